"""Replicas of a model, and the average of their gradients."""
