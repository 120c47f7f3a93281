"""Runs as `python -m tests.fuzz` in the repository and as `python -m fuzz` in tests/, whose packages it needs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.command import main

if __name__ == "__main__":
    sys.exit(main())
