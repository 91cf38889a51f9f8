"""`python -m recjax.cli.main`."""

import sys

from recjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
