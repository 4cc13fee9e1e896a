"""Families of transformers, one file each: how it is split, and its state dicts translated.

A model that is split in place keeps Hugging Face's names; the functions between state dicts
are for models that distributed modules have replaced, and leave its own as they are.
"""
