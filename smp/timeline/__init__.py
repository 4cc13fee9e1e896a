"""The ranks' work in the last step."""
