"""Tables of a person's own, read through Arrow: files, columns and their roles, splits, and the reader of all that."""
