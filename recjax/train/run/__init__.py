"""The run folder: lock, metrics, summary, pictures, and opening it afterwards."""
