"""Across: the sparse reduction that a hierarchy runs between its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..transports.transport import Transport
from ..vector import SparseVector
from ..wire import Format
from . import gtopk, oktopk
from .gtopk_options import GtopkOptions
from .options import check_names
from .outcome import Outcome
from .regions import Regions

ReduceList = Callable[[SparseVector, int, int, Transport, int], Outcome]


class Across(NamedTuple):
    """A reduction that is told a shard's share of k and of k_out, and who refused already.

    k_out: how many entries the whole update may have, where the algorithm has this dial; else k.
    """

    reduce: ReduceList
    k_out: int


def open_across(name: str, format: Format, options: dict[str, Any], k: int, length: int) -> Across:
    """Return "gtopk" or "oktopk" with its options; raise ValueError where one is out of bounds."""
    if name == "gtopk":
        check_names(name, gtopk.reduce, options)
        options_of_all = GtopkOptions(format, **options).checked()

        def by_gtopk(
            picks: SparseVector, k: int, k_out: int, transport: Transport, refused_by: int
        ) -> Outcome:
            return gtopk.reduce_list(picks, k, transport, options_of_all, refused_by)

        return Across(by_gtopk, k)
    if name == "oktopk":
        check_names(name, oktopk.reduce, options)
        regions = options.get("regions") or Regions()

        def by_oktopk(
            picks: SparseVector, k: int, k_out: int, transport: Transport, refused_by: int
        ) -> Outcome:
            return oktopk.reduce_list(picks, k, k_out, transport, format, regions, refused_by)

        return Across(by_oktopk, oktopk.checked_k_out(k, options.get("k_out"), length))
    raise ValueError(f"across must be one of gtopk, oktopk; got {name!r}")
