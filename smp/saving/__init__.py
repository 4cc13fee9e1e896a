"""State dicts over the ranks, and checkpoints of them."""
