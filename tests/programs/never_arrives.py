"""All ranks but the first end before they join the others or, with an argument, stay alive."""

import sys
import time

from gtopk.runtime.launch import launched_by

if (job := launched_by()) is None or job.rank != 0:
    if sys.argv[1:]:
        time.sleep(600)  # their launcher ends them
    sys.exit(0)

import gtopk.torch as hvd

hvd.init()
