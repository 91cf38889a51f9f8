"""Parts that several tests share. Tests import them from here; the product never does."""
