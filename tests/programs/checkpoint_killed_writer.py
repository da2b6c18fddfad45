"""Kill processes that save checkpoints; load_latest must then return the last complete checkpoint.

Arguments: a folder, and how many to kill. Every other writer kills itself within a save, just
before one of the save's file operations, each of them in turn. The others are killed after a random
time. Prints how many of the first kind left an incomplete checkpoint, how many left the new
checkpoint complete, and how many file operations a save has.
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
from gtopk.runtime.world import world
from gtopk.torch.checkpoint.files import list_parts, missing_parts

torch.set_num_threads(1)  # a pool of threads would not survive the fork
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
dice = random.Random(rounds)
BEGUN, DONE = b"\0", b"\1"
# The audit events of a save's file operations.
TO_FILES = ("open", "os.", "shutil.", "tempfile.")


class Deed:
    """Counts the file operations of saves, and kills this process just before one of them."""

    def __init__(self, last: int | None = None) -> None:
        self.done = 0
        self.saving = False
        self._last = last
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.saving and event.startswith(TO_FILES) and event != "os.kill":
            if self.done == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
            self.done += 1


def load(model: torch.nn.Module) -> int:
    found = load_latest(folder, model)
    return found.step if found else 0


def save_on(pipe: int, saves: int | None, deed: Deed) -> None:
    """Save step after step, a given number of times or until this process is killed."""
    with world.entered(local_world(1)[0]):
        model = torch.nn.Linear(300, 300)
        step = load(model)
        while saves is None or saves > 0:
            step, saves = step + 1, None if saves is None else saves - 1
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, step)
            os.write(pipe, BEGUN)
            deed.saving = True
            save_checkpoint(folder, model, None, step=step)
            deed.saving = False
            os.write(pipe, DONE)


def start(saves: int | None, last: int | None = None) -> tuple[int, int]:
    """Fork a process that saves; return it, and the pipe to which it reports each save."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        save_on(writer, saves, Deed(last))
        os._exit(0)
    os.close(writer)
    return pid, reader


def deeds_of_a_save() -> int:
    """Return how many file operations a save has when it also removes old checkpoints."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        deed = Deed()
        save_on(os.open(os.devnull, os.O_WRONLY), 5, deed)
        before = deed.done
        save_on(os.open(os.devnull, os.O_WRONLY), 1, deed)
        os.write(writer, str(deed.done - before).encode())
        os._exit(0)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return int(os.read(reader, 100))


def look() -> tuple[int, bool]:
    """Return the last complete step, and whether there are files of a later one."""
    with world.entered(local_world(1)[0]):
        model = torch.nn.Linear(300, 300)
        step = load(model)
        for parameter in model.parameters() if step else ():
            assert bool((parameter == step).all()), f"step {step} is not whole"
        there = list_parts(folder)
        whole = {p.number for p in there if not missing_parts(*p[:3], there)}
        last = max(whole, default=0)
        begun = {int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")}
        return step, max(begun, default=0) > last


deeds = deeds_of_a_save()
step, _ = look()
left = new = 0
save_seconds = 0.01
for number in range(rounds):
    by_deed = number % 2 == 0
    # All of them, from the first to the last, however many rounds there are.
    pid, reader = start(None, number * deeds // rounds if by_deed else None)
    if not by_deed:
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
    output = BEGUN * (not by_deed) + os.read(reader, 1000)
    os.close(reader)
    step += output.count(DONE)
    found, some_left = look()
    assert found in (step, step + 1), f"step {found} was loaded after {step}"
    if by_deed:
        assert output == BEGUN, "a writer outlived its first save"
        left += some_left
        new += found > step
    step = found
print(left, new, deeds)
