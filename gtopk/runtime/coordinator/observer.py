"""Observer: what the engine tells while it works, for a timeline.

    engine.observe(observer)      observer(event) is called in the engine's thread: be quick
    engine.ignore(observer)

An operation, from the first rank that is ready for it:

    begin negotiate  name         some rank is ready, this one or another
    mark  ready      name, rank   which one; once for each rank
    end   negotiate  name         all are (or it failed: then nothing is executed)
    begin execute    name
    begin copy-in    name         only of dense arrays that are reduced as one: into the buffer
    end   copy-in    name
    begin reduce     name         only of dense arrays
    end   reduce     name
    begin copy-out   name         as copy-in
    end   copy-out   name
    end   execute    name
    mark  cycle      ""           all ranks have said what they are ready for

Arrays that are reduced as one begin and end each of these at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Phase = Literal["begin", "end", "mark"]
What = Literal["negotiate", "ready", "execute", "copy-in", "reduce", "copy-out", "cycle"]


class Event(NamedTuple):
    """Something the engine did.

    seconds: on the clock of time.perf_counter.
    rank:    in the world; only of "ready".
    """

    phase: Phase
    what: What
    name: str
    seconds: float
    rank: int | None = None


Observer = Callable[[Event], None]
