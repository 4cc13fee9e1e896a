"""A step: microbatches, the server's calls into Python, and the values beside arguments."""
