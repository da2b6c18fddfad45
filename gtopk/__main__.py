"""`python -m gtopk` is the command `gtopk`."""

import sys

from .cli.main import main

sys.exit(main())
