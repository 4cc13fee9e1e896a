"""The state of a job's steps, and its parts for threads, microbatches and backwards."""
