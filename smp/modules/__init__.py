"""What becomes of the user's modules: remote ones, hooks, late initialization."""
