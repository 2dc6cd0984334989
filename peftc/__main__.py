"""`python -m peftc`: the command, where no script is installed on the path."""

import sys

from peftc.cli.main import script

if __name__ == "__main__":
    sys.exit(script())
