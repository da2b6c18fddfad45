"""Recovery: run a function again from the last commit, as long as every rank is there.

    sync -> function -> done
      ^        |
      |        |-- HorovodInternalError    restore \
      |        `-- HostsUpdatedInterrupt            > join anew -> on_reset -.
      `----------- (unless skip_sync) --------------------------------------'

A rank that has died cannot be called back from inside. The others then end, the job with them; what
starts it again (torchrun --max-restarts, a person) finds the commits that GTOPK_ELASTIC_DIR keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, TypeVar

from ...errors import HorovodInternalError, HostsUpdatedInterrupt
from ...runtime.world import world
from .base import State

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")

# An error that comes at every attempt is no accident.
_ATTEMPTS: Final = 10  # from one commit


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a training function, whose first argument is a State, to survive failures.

    Needs no elastic launcher: any that starts gtopk's ranks will do. When an operation fails on
    ranks that all live (they disagreed, or one raised HorovodInternalError), every rank returns to
    its last commit and calls the function again. When a rank has died or stays silent, the others
    raise HorovodInternalError, which names it and says how the job can go on.
    """
    return run_fn(func, world.rejoin)


def run_fn(
    func: Callable[Concatenate[S, P], T], reset: Callable[[], object]
) -> Callable[Concatenate[S, P], T]:
    """Decorate as `run` does, with another way for the ranks to come together anew."""

    @functools.wraps(func)
    def recovering(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        skip_sync = False
        attempts, commits = 1, state._commits
        while True:
            restored = False
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                attempts = 1 if state._commits > commits else attempts + 1
                commits = state._commits
                if attempts > _ATTEMPTS:
                    raise
                state.restore()
                restored, skip_sync = True, False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            reset()
            if restored:
                state._go_back()
            state.on_reset()

    return recovering
