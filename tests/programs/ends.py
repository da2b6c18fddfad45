"""A training loop in which one rank ends in a given way at step 5; "well": it completes.

Arguments: the way, and the rank.
"""

import os
import signal
import sys
import threading
import time
from typing import Any

import light_torch  # noqa: F401

import torch

import gtopk.torch as hvd
from gtopk.runtime.launch import launched_by
from gtopk.runtime.world import guard, world

way, culprit = sys.argv[1], int(sys.argv[2])


def end_here() -> None:
    match way:
        case "exception" | "exception, and a rank is slow to speak":
            raise RuntimeError("boom")
        case "exception, and SIGTERM in mid-sentence":
            write = guard.write_error_file

            def write_when_stopped(*words: Any) -> None:
                os.kill(os.getpid(), signal.SIGTERM)
                write(*words)

            guard.write_error_file = write_when_stopped
            raise RuntimeError("boom")
        case "SIGTERM, and again while it is announced":
            assert world._guard is not None
            own = world._guard
            record_end = own._record_end

            def record_when_stopped_again(how: str, error: Any = None) -> None:
                own._record_end = record_end
                os.kill(os.getpid(), signal.SIGTERM)
                record_end(how, error)

            own._record_end = record_when_stopped_again
            os.kill(os.getpid(), signal.SIGTERM)
        case "exception, once the heartbeat's secret is printed":
            assert world._guard is not None
            assert world._guard._heartbeat is not None
            print(f"secret {world._guard._heartbeat._setting.secret}\n", end="", flush=True)
            raise RuntimeError("boom")
        case "exit 0":
            sys.exit(0)
        case "exit 3":
            sys.exit(3)
        case "exception with a live thread":
            threading.Thread(target=time.sleep, args=(1000,)).start()
            raise RuntimeError("boom")
        case "exit 0 with a live thread":
            threading.Thread(target=time.sleep, args=(1000,)).start()
            sys.exit(0)
        case "exception in a thread":
            threading.Thread(target=lambda: 1 / 0).start()
            time.sleep(1000)
        case "os._exit":
            os._exit(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "shutdown":
            hvd.shutdown()
            time.sleep(1000)
        case "well":
            pass


def speak_slowly(*error: object) -> None:
    time.sleep(0.5)
    sys.__excepthook__(*error)


job = launched_by()
assert job is not None
if way.endswith("slow to speak") and job.rank == 1:
    sys.excepthook = speak_slowly
hvd.init()
model = torch.nn.Linear(10, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01),
    model.named_parameters(),
    hvd.Compression.gtopk(0.5),
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
print(f"pid {os.getpid()}\n", end="", flush=True)
for step in range(20):
    if step == 5 and hvd.rank() == culprit:
        print(f"ending at {time.time()}\n", end="", flush=True)
        if way == "early return":
            break
        end_here()
    optimizer.zero_grad()
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
