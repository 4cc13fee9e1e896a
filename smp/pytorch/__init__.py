"""PyTorch and Python as smp uses them: devices, values, compiled code.  No ranks."""
