"""Tables without a vocabulary: rows are given to 64-bit keys in the course of a training."""
