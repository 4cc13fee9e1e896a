"""Parameters that hold a slice of the whole, and their marks."""
