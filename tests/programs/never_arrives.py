"""All ranks but the first end before they join the others."""

import sys

import gtopk.torch as hvd
from gtopk.launch import launched_by

job = launched_by()
if job is None or job.rank != 0:
    sys.exit(0)
hvd.init()
