"""Predicts from the compiled program how long a training step takes on a machine, measured or not."""
