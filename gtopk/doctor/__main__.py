"""`python -m gtopk.doctor`, where the command `gtopk` is not installed."""

import sys

from . import main

sys.exit(main())
