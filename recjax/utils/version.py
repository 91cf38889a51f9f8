"""The number of this version. It stands apart from the package's root, which all of the package would import for it."""

__version__ = "0.1.0"
