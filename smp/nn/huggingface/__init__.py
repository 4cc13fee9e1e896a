"""Families of transformers, one file each: how it is split, and its state dicts translated.

A model that is split in place keeps Hugging Face's names.  The functions between the state
dicts of models that distributed modules have replaced are not built.
"""
