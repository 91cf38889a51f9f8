"""Traces of recjax's own training step: `recjax trace`."""
