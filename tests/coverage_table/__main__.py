"""`python -m tests.coverage_table` in the repository: its packages are in tests/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from coverage_table.command import main

if __name__ == "__main__":
    sys.exit(main())
