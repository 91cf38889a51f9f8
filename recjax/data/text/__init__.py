"""Parsers of text files that name file, line and column of a fault."""
