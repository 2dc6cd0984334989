"""`python -m peftc`: the command, where no script is installed on the path."""

from __future__ import annotations

import sys

from peftc.cli.main import script

if __name__ == "__main__":
    sys.exit(script())
