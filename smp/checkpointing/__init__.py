"""Forwards that run again in backward, in the place of kept activations."""
