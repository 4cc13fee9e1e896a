"""Hugging Face models: the functions between their state dicts and distributed ones.

They translate what tensor parallelism replaces, which is not built: a model that is
only partitioned keeps Hugging Face's names.
"""
