"""A step: microbatches, what the server calls, what travels with a call."""
