"""The training state, the step, the loop, and what a run measures, writes and keeps."""
