"""The order of collectives, and gradients."""
