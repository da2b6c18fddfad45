"""Print what each rank's init() raises if a setting is wrong on rank 1 only."""

from __future__ import annotations

import os

if int(os.environ["RANK"]) == 1:
    os.environ["GTOPK_HEARTBEAT_TIMEOUT"] = "abc"

import gtopk.torch as hvd

try:
    hvd.init()
except Exception as error:
    print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}\n", end="", flush=True)
