"""`python -m suite`: see suite.cli."""

import sys

from suite.cli import main

sys.exit(main())
