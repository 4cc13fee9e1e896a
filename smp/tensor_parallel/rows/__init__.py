"""Split modules' calls: rows of all tp_ranks in, own rows out."""
