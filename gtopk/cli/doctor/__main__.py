"""`python -m gtopk.cli.doctor`, where the command `gtopk` is not installed."""

import sys

from ..main import main

sys.exit(main(["doctor", *sys.argv[1:]]))
