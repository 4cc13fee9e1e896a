"""Which rank gets which module: tracing, the decision, and ways to look at it."""
