"""The same as the program `recjax`: `python -m recjax`."""

import sys

from recjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
