"""All ranks but the first end before they join the others."""

import sys

from gtopk.launch import launched_by

if (job := launched_by()) is None or job.rank != 0:
    sys.exit(0)

import gtopk.torch as hvd

hvd.init()
