"""The study of predictions: how far they are off, whether plans are ranked right, and what published figures become."""
