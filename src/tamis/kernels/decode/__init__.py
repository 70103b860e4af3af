"""Attention of a few queries to many keys, without gradients."""
