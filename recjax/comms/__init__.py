"""Communication: what the compiled step exchanges. Imports nothing of the trainer."""
