"""Ends the programs of these tests: all ranks together, with the reason if one failed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from collectives import Transport


@contextmanager
def job(transport: Transport) -> Iterator[None]:
    """Leave together at the end; end every rank if this one fails."""
    try:
        yield
        transport.leave("the program is over")
    except BaseException:
        traceback.print_exc()
        transport.abort(1)
