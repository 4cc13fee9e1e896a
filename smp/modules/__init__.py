"""The user's modules under smp: remote ones, hooks, late initialization."""
