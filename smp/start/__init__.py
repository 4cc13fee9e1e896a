"""The start and the end of a job, and reports about it."""
