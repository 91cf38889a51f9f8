"""Runs the collectives of a trace again, and times plain ones."""
