"""`python -m gtopk.doctor`, where the command `gtopk` is not installed."""

import sys

from ..cli import main

sys.exit(main(["doctor", *sys.argv[1:]]))
