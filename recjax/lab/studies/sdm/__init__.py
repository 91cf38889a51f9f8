"""The study of inference from disk, after Ardestani et al. (SDM)."""
