"""Models: the dense part over pooled embeddings, one file each with its config."""
