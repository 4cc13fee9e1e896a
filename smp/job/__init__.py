"""The ranks of a job: their start, their places, their messages, and the job's end."""
