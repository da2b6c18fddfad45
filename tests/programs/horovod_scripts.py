"""Runs scripts written for Horovod one after the other on the same ranks, as as_horovod does.

horovod_scripts.py FOLDER SCRIPT,ARGUMENT,... SCRIPT,ARGUMENT,...
"""

from __future__ import annotations

import os
import sys

import gtopk.torch as hvd
from gtopk.as_horovod import install
from gtopk.as_horovod.__main__ import run_script

folder, *jobs = sys.argv[1:]
os.environ["GTOPK_ALLOW_PICKLE"] = "1"
install()
for job in jobs:
    name, *arguments = job.split(",")
    run_script(os.path.join(folder, name), arguments)
    if hvd.rank() == 0:
        print(f"== {name}", flush=True)
    hvd.shutdown()
