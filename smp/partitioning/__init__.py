"""The rank of each module: tracing, the decision, and ways to look at it."""
