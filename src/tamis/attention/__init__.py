"""Attention in plain torch: who sees whom, scores to outputs, and statistics.  The CPU path, and the oracle."""
