"""Preemption: after SIGTERM on any rank, all ranks learn of it after the same step.

    rank 0   | step 41 | step 42 | save | exit 143
    rank 1   | step 41 x step 42 | save | exit 143      x: SIGTERM; a flag of step 42 announces it

Schedulers send SIGTERM some seconds before a host goes away: to one rank, or to all at different
times. Without `termination` it ends the rank, and so the job, at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Final

from ..coordinator.agreement import name_ranks
from ..launch.job import own_place
from ..standard_streams import write_line
from . import world
from .guard import Guard, call_after_fork
from .membership import World

# The exit code that shells report for a program ended by SIGTERM.
EXIT_CODE: Final = 128 + signal.SIGTERM


def termination() -> Termination:
    """Return an object that turns true on all ranks after the same step, once one got SIGTERM.

        with gtopk.termination() as preempted:
            for inputs, targets in loader:
                ...
                optimizer.step()
                if preempted:
                    gtopk.save_checkpoint(folder, model, optimizer, loader, step)
                    break

    When the block then ends, every rank exits with code 143. The request travels with the flags of
    DistributedOptimizer's steps, of `gtopk.ddp`'s hook and of LocalSGD's outer steps; elsewhere
    call `ask`. A second SIGTERM ends its rank at once, as does the first one without the block.
    """
    return Termination()


class Termination:
    """True once all ranks know that one of them received SIGTERM."""

    def __init__(self) -> None:
        self._world = world.current()
        self._previous_handler: Any = signal.SIG_DFL

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that received SIGTERM; all ranks learn of them after the same step."""
        return list(self._current_or_last_world().preempted)

    def __bool__(self) -> bool:
        return bool(self._current_or_last_world().preempted)

    def ask(self) -> bool:
        """Ask all ranks now, in a small exchange; all ranks must call it at the same place.

        Needed where steps carry no flags: FSDP replicas, Adasum, and all `adapt` modes but
        "balanced".
        """
        here = self._current_or_last_world()
        all_flags = here.engine.submit(
            "termination",
            [],
            lambda transport, all_flags: all_flags,
            flags=here.termination_requested,
        ).wait()
        here.note_preempted([rank for rank, flags in enumerate(all_flags) if flags])
        return bool(self)

    def __enter__(self) -> Termination:
        """Handle SIGTERM from now on; raise ValueError outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "gtopk.termination() must be entered in the main thread, the only one that handles "
                f"signals in Python, got thread '{threading.current_thread().name}'"
            )
        # None: a handler that was not set from Python, which Python cannot restore.
        self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm) or signal.SIG_DFL
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the SIGTERM handler; end the program if a rank was preempted."""
        # Skip if the script, or another block, has set a handler since.
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous_handler)
        if error is None and not self and self._current_or_last_world().termination_requested:
            self._print(
                "received SIGTERM after the last step, so the other ranks do not know of it: take "
                "another step within a block, or call ask() at the same place on all ranks"
            )
        if error is not None or not self:
            return
        # A launcher may send SIGTERM to ranks that end last; they need not report it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        here = self._current_or_last_world()
        reason = f"as {name_ranks(here.preempted)} received SIGTERM"
        here.note_end(f"ended at step {here.step}, {reason}", in_order=True)
        self._print(f"ends at step {here.step}, {reason}: exit code {EXIT_CODE}")
        sys.exit(EXIT_CODE)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        # First: a second SIGTERM must end this rank at once, even during this handler.
        signal.signal(signal.SIGTERM, self._previous_handler)
        here = self._current_or_last_world()
        here.termination_requested = True  # a rank lost later also ends this one
        if world.has_lost_rank():  # the launcher ends the remaining ranks: no time to save
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._print(
            f"received SIGTERM at step {here.step}: all ranks will know after one of the next two "
            "steps; a second SIGTERM ends this rank at once"
        )

    def _current_or_last_world(self) -> World:
        """Return the world, or the last one after `shutdown`."""
        if world.is_initialized():
            self._world = world.current()
        return self._world

    def _print(self, what: str) -> None:
        """Write a line to stderr without the stream, whose lock a signal handler could wait for."""
        write_line(f"rank {self._world.rank} of {self._world.size} ({own_place()}) {what}")


def _after_fork() -> None:
    """Let SIGTERM end a forked child (a worker of a Pool, say), which is not a rank."""
    handler = installed = signal.getsignal(signal.SIGTERM)
    while isinstance(outer := getattr(handler, "__self__", None), Termination):  # nested blocks
        handler = outer._previous_handler
    if handler is not installed:
        is_guard = isinstance(getattr(handler, "__self__", None), Guard)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if is_guard else handler)


call_after_fork(_after_fork)
