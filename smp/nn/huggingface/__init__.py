"""Families of transformers: how each is split, one file a family."""
