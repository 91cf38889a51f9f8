"""Measures the training step, its parts, and the same step of other libraries."""
