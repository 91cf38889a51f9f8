"""From source files to host batches: schema, prepared blocks, sampling order, datasets."""
