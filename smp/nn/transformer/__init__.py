"""Transformers whose attention heads and channels are split over the TP_GROUP.

One option set (``options``) makes BERT's layers, GPT's, and others'; ``token_stream`` has what
travels between the ranks.
"""
