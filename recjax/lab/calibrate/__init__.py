"""Measures what a machine can do, for predictions."""
