"""Two ranks leave while they handle an exception, which must end neither the other nor the job.

Arguments: a folder of the test, and which exceptions, one after the other.
"""

import gc
import sys
import threading
import time
import weakref
from pathlib import Path

import light_torch  # noqa: F401

import torch

import gtopk.torch as hvd
from gtopk.runtime.world import world

folder = Path(sys.argv[1])


def await_file(name: str) -> None:
    while not (folder / name).exists():
        time.sleep(0.01)


def train() -> None:
    """Save on rank 0 after the last step; rank 1 has nothing to save."""
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if hvd.rank() == 0:
        await_file("about to leave")
        (folder / "saved").touch()
    else:
        (folder / "about to leave").touch()
    hvd.shutdown()
    assert (folder / "saved").exists()


for way in sys.argv[2:]:
    match way:
        case "one before init":
            try:
                import no_such_package  # noqa: F401
            except ImportError:
                train()
        case "one that ended the loop":
            hvd.init()
            rank = hvd.rank()
            try:
                hvd.allreduce(torch.ones(1))
                raise StopIteration
            except StopIteration:
                if rank == 0:
                    await_file("left")  # rank 1's shutdown() returns, and ends nobody
                    hvd.shutdown()
                else:
                    hvd.shutdown()
                    (folder / "left").touch()
                hvd.init()
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        case "one while the other waits":
            hvd.init()
            try:
                if hvd.rank() == 0:
                    hvd.barrier()
                raise ValueError("boom")
            except ValueError:
                hvd.shutdown()
            except hvd.HorovodInternalError as error:
                print(f"rank 0: {error}\n", end="", flush=True)
        case "one of long ago":
            hvd.init()
            try:
                raise ValueError("boom")
            except ValueError:
                hvd.shutdown()
            assert world._leaving is not None
            world._leaving._thread.join()  # both ranks have left
            thread = threading.Thread(target=lambda: [][0], name="of the script's own")
            thread.start()
            thread.join()
        case "one that holds much":

            class Much:
                pass

            def fail(held: list[weakref.ref[Much]]) -> None:
                much = Much()
                held.append(weakref.ref(much))
                raise MemoryError

            held: list[weakref.ref[Much]] = []
            try:
                fail(held)
            except MemoryError:
                hvd.init()
            gc.collect()
            assert held[0]() is None
            hvd.shutdown()
    print(f"well after {way}\n", end="", flush=True)
