"""Scores to weights, in plain torch: the solver, its derivatives, relatives and losses."""
