"""Transformers with attention heads and channels split over the TP_GROUP.

One option set (``options``) makes BERT's layers, GPT's, and others'; ``token_stream`` has the
tensors between the ranks.
"""
