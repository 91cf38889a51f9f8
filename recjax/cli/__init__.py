"""The command line."""

from recjax.cli.main import main

__all__ = ["main"]
