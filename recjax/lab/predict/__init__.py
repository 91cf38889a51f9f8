"""Predicts steps and plans on a machine, and compares them with what is measured."""
