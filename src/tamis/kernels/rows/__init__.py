"""Entmax and its loss over the rows of a matrix."""
