"""The names under which existing scripts import this project: see `modelparallel`."""
