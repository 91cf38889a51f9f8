"""Checkpoints: arrays, manifest, and how several processes write one."""
