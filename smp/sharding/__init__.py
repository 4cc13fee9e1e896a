"""Optimizer state shared out among the ranks that hold the same parameters."""
