"""Kill processes that save checkpoints; what load_latest gives then must be whole, and the last.

Arguments: a folder, and how many to kill. Prints how many were killed within save_checkpoint, how
many of these left some of its files, and how many times the new checkpoint was whole.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import light_torch  # noqa: F401
import torch

from collectives.transports import local_world
from gtopk import load_latest, save_checkpoint
from gtopk.torch.checkpoint.files import absent_of, list_parts
from gtopk.world import world

torch.set_num_threads(1)  # a pool of threads would not survive the fork
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
dice = random.Random(rounds)
BEGUN, DONE = b"\0", b"\1"


def load(model: torch.nn.Module) -> int:
    found = load_latest(folder, model)
    return found.step if found else 0


def save_on(pipe: int) -> None:
    """Save one step after the other, until this process is killed."""
    with world.entered(local_world(1)[0]):
        model = torch.nn.Linear(300, 300)
        step = load(model)
        while True:
            step += 1
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, step)
            os.write(pipe, BEGUN)
            save_checkpoint(folder, model, None, step=step)
            os.write(pipe, DONE)


def start() -> tuple[int, int]:
    """Fork a process that saves; return it, and what it writes to before and after each."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        save_on(writer)
    os.close(writer)
    return pid, reader


def look() -> tuple[int, bool]:
    """Return what step is whole, and whether there is some of a later one."""
    with world.entered(local_world(1)[0]):
        model = torch.nn.Linear(300, 300)
        step = load(model)
        for parameter in model.parameters() if step else ():
            assert bool((parameter == step).all()), f"step {step} is not whole"
        there = list_parts(folder)
        whole = {p.number for p in there if not absent_of(*p[:3], there)}
        last = max(whole, default=0)
        begun = {int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")}
        return step, max(begun, default=0) > last


save_seconds = 0.01
within = left = new = step = 0
for _ in range(rounds):
    pid, reader = start()
    for _ in range(dice.randrange(4)):
        assert os.read(reader, 1) == BEGUN
        begun = time.perf_counter()
        assert os.read(reader, 1) == DONE
        save_seconds = time.perf_counter() - begun
        step += 1
    assert os.read(reader, 1) == BEGUN
    time.sleep(dice.uniform(0, 0.9) * save_seconds)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    said = BEGUN + os.read(reader, 1000)
    os.close(reader)
    step += said.count(DONE)
    found, some_left = look()
    assert found in (step, step + 1), f"step {found} was loaded after {step}"
    within += said.endswith(BEGUN)
    left += some_left
    new += found > step
    step = found
print(within, left, new)
