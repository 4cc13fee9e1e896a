"""What scripts import in place of PyTorch's own functions."""
