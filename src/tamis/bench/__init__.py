"""Benchmarks: every speed claim of the project comes from here."""
