"""Small tools that every package uses: files, text tables, strict JSON, lazy arrays."""
