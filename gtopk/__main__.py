"""`python -m gtopk` is the command `gtopk`."""

import sys

from .cli import main

sys.exit(main())
