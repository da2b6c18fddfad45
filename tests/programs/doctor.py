"""The doctor in each rank of a job."""

import sys

from gtopk.cli import main

sys.exit(main(["doctor"]))
