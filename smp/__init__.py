"""Model parallelism for PyTorch without rewriting the model."""

__version__ = "0.1.0"
