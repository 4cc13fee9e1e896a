"""Marks of modules, and the modules split or replaced by them."""
