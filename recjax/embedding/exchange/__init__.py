"""Exchanges: the rows of tables reach the samples of a step, gradients come back, and both say what they send."""
