"""All ranks but the first end before they join the others."""

import os
import sys

if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK")) != "0":
    sys.exit(0)

import gtopk.torch as hvd

hvd.init()
