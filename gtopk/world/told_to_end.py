"""Told to end: SIGTERM on any rank becomes word that all ranks have after the same step.

    rank 0   | step 41 | step 42 | save | exit 143
    rank 1   | step 41 x step 42 | save | exit 143      x: SIGTERM; the vote of step 42 tells of it

Schedulers send SIGTERM to one rank, or to all but not at one time, some seconds before a host goes.
Without a termination it ends the rank, and so the job, at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Final

from ..engine.agreement import name_ranks
from . import world
from .guard import Guard

EXIT_CODE: Final = 128 + signal.SIGTERM


def termination() -> Termination:
    """Return what says whether a rank was told to end (SIGTERM), on all ranks after the same step.

        with gtopk.termination() as told:
            for inputs, targets in loader:
                ...
                optimizer.step()
                if told:
                    gtopk.save_checkpoint(folder, model, optimizer, loader, step)
                    break

    On leaving the block after that, every rank ends with exit code 143. The word travels with the
    votes of DistributedOptimizer's steps, those of `gtopk.ddp`'s hook and LocalSGD's outer steps;
    `ask` is for others. A second SIGTERM ends its rank at once, as any does without the block.
    """
    return Termination()


class Termination:
    """True once all ranks know that one of them was told to end."""

    def __init__(self) -> None:
        self._world = world.current()
        self._before: Any = signal.SIG_DFL

    @property
    def ranks(self) -> list[int]:
        """Return which ranks were told, as far as all know."""
        return list(self._here().told)

    def __bool__(self) -> bool:
        return bool(self._here().told)

    def ask(self) -> bool:
        """Ask all ranks now, in a small exchange of its own; they call it at the same place.

        For steps that do not tell: of FSDP's replicas, Adasum, and `adapt`'s modes but "balanced".
        """
        here = self._here()
        votes = here.engine.submit(
            "termination", [], lambda transport, votes: votes, vote=here.told_here
        ).wait()
        here.hear([rank for rank, vote in enumerate(votes) if vote])
        return bool(self)

    def __enter__(self) -> Termination:
        """Hear SIGTERM from now on; raise ValueError in another than the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "gtopk.termination() must be entered in the main thread, the only one that Python "
                f"tells of signals, got thread '{threading.current_thread().name}'"
            )
        self._before = signal.signal(signal.SIGTERM, self._on_sigterm) or signal.SIG_DFL
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give SIGTERM back; end the program where it was told to and has no other end."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._before)
        if error is None and not self and self._here().told_here:
            self._say(
                "had SIGTERM after the last step, of which no other rank knows: a step within "
                "another block tells them, or ask() of this one at the same place on all ranks"
            )
        if error is not None or not self:
            return
        # The launcher may send it to whoever ends last: there is nothing to say to that.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        here = self._here()
        by = f"as {name_ranks(here.told)} had SIGTERM"
        here.note_end(f"ended at step {here.step}, {by}", in_order=True)
        self._say(f"ends at step {here.step}, {by}: exit code {EXIT_CODE}")
        sys.exit(EXIT_CODE)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, self._before)
        here = self._here()
        here.told_here = True  # a rank that is lost later ends this one
        if world.misses_a_rank():  # the launcher ends those that are left: nothing can be saved
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._say(
            f"had SIGTERM at step {here.step}: all ranks will know after one of the next two "
            "steps; a second one ends this rank at once"
        )

    def _here(self) -> world.World:
        """Return the world, or the last one after `shutdown`."""
        if world.is_initialized():
            self._world = world.current()
        return self._world

    def _say(self, what: str) -> None:
        """Write a line on stderr in one write, as a signal's handler can."""
        name = f"rank {self._world.rank} of {self._world.size}"
        place = f"host {socket.gethostname()}, pid {os.getpid()}"
        with contextlib.suppress(OSError):  # stderr is closed
            os.write(2, f"gtopk: {name} ({place}) {what}\n".encode())


def _after_fork() -> None:
    """Let SIGTERM end a forked child (a worker of a Pool, say), which is no rank."""
    handler = first = signal.getsignal(signal.SIGTERM)
    while isinstance(told := getattr(handler, "__self__", None), Termination):  # one in another
        handler = told._before
    if handler is not first:
        of_guard = isinstance(getattr(handler, "__self__", None), Guard)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if of_guard else handler)


os.register_at_fork(after_in_child=_after_fork)
