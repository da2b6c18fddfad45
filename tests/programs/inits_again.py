"""Run on two ranks, which first have different heartbeat timeouts, then the same."""

import os
import sys

import light_torch  # noqa: F401

import torch
from checks import raises

import gtopk.torch as hvd
from gtopk.runtime.launch import launched_by

hook = sys.excepthook
job = launched_by()
assert job is not None
own = "5" if job.rank == 0 else "0"
os.environ["GTOPK_HEARTBEAT_TIMEOUT"] = own
for _ in range(2):
    raises(hvd.HorovodInternalError, hvd.init, "GTOPK_HEARTBEAT_TIMEOUT=5")
    assert not hvd.is_initialized()
    assert sys.excepthook is hook
    hvd.shutdown()
os.environ["GTOPK_HEARTBEAT_TIMEOUT"] = "5"
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
hvd.shutdown()
print("well\n", end="", flush=True)
