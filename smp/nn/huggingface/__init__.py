"""Families of transformers, one file each: a family's split, and its state dicts translated.

A model split in place keeps Hugging Face's names.  The functions between state dicts are for
models replaced by distributed modules, and leave other dicts as they are.
"""
