"""The doctor in each rank of a job."""

import sys

from gtopk.cli.main import main

sys.exit(main(["doctor"]))
