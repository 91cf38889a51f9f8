"""One reader a file: raw files of a public dataset to chunks of rows."""
