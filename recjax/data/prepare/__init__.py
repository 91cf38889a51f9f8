"""Raw files to prepared blocks: chunks, vocabularies, encoding, work folders, Beam."""
