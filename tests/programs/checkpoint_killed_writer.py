"""Kill processes that write parts of checkpoints; every part that is there must be whole.

Arguments: a folder, and how many to kill. Prints how many were killed within a write, and
how many parts were whole.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from gtopk.torch.checkpoint.files import Content, Part, list_parts, read_part, write_part
from gtopk.torch.checkpoint.tree import take_apart

torch.set_num_threads(1)  # a pool of threads would not survive the fork
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
dice = random.Random(rounds)


def write(number: int, step: int) -> None:
    state = take_apart({"round": number, "values": torch.full((100_000,), float(number))})
    write_part(folder, Part(number, step, 1, "all"), Content("word", state))


def start(number: int, steps: int) -> int:
    """Fork a process that writes parts."""
    pid = os.fork()
    if pid == 0:
        for step in range(steps):
            write(number, step)
        os._exit(0)
    return pid


begun = time.perf_counter()
os.waitpid(start(0, steps=3), 0)
# A disk may take ten times as long as another: what is killed is within its first parts.
write_seconds = (time.perf_counter() - begun) / 3
shutil.rmtree(folder)
folder.mkdir()
within = whole = 0
for number in range(rounds):
    pid = start(number, steps=1000)
    time.sleep(dice.uniform(1, 8) * write_seconds)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    within += any(folder.glob("*/*.part"))
    for part in list_parts(folder):
        state = read_part(folder, part).state
        assert state.tree["round"] == number
        assert bool((state.tensors["values"] == number).all())
        whole += 1
    for path in folder.iterdir():
        shutil.rmtree(path)
print(within, whole)
