"""Fused attention, forward and backward."""
