"""`python -m gradrein` is the `gradrein` command."""

import sys

from gradrein_cli import main

if __name__ == "__main__":
    sys.exit(main())
