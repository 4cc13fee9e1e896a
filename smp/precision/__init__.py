"""Half precision: models of bfloat16 or float16, trained with float32 master weights."""
