"""`python -m bridle` is the `bridle` command."""

import sys

from bridle_cli import main

if __name__ == "__main__":
    sys.exit(main())
