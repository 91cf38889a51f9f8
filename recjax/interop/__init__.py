"""Weights of other libraries, in and out."""
