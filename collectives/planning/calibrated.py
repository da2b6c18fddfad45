"""Calibrated: the calibration of this run, from the cache or measured, the same on every rank."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Final

from .. import environment
from ..kernels import in_use
from ..transports.transport import Transport
from ..wire import EXACT, Format
from .cache import Facts, as_json, cache_path, calibration_from, load, save
from .calibration import Calibration, assumed, measure
from .core_oversubscription import ranks_per_core
from .probes import Clock
from .recheck import still_holds

# Of what the numbers of a calibration mean: one more whenever that of a field changes, or how it is
# measured, so that what was kept by another meaning is measured anew.
MODEL: Final = 4


def calibrate(
    transport: Transport,
    formats: Sequence[Format] = (EXACT,),
    facts: Mapping[str, str] | None = None,
    clock: Clock = time.perf_counter,
) -> Calibration:
    """Return the calibration; every rank must call it, and all get rank 0's.

    What was kept is looked at first, and measured anew where the links hold it no more.
    facts: what it depends on besides hosts, transport, kernels and formats: versions.
    GTOPK_CALIBRATION=off assumes Gigabit Ethernet and measures nothing; =fresh measures in any
    case; =PATH keeps the cache in that file. Without it the cache is in XDG_CACHE_HOME, or in the
    home folder's .cache; without a home folder nothing is kept.
    """
    setting = environment.calibration()  # rank 0's counts
    word = setting.lower()
    known = _facts(transport, formats, facts or {})
    found, path, is_kept = None, None, False
    if transport.rank == 0 and word == "off":
        found = assumed(transport.size)
    elif transport.rank == 0:
        path = cache_path(known) if word in ("", "fresh") else Path(setting)
    if path is not None and word != "fresh":
        found = load(path, known, transport.size)
        if is_kept := found is not None:
            found = replace(found, origin=f"{found.origin}, kept in {path}")
    record, is_kept = transport.broadcast_object([as_json(found) if found else None, is_kept])
    if record is not None:
        told = calibration_from(record)
        if not is_kept or still_holds(transport, told, clock):
            return told
    calibration = measure(transport, formats, clock)
    if path is not None:
        save(path, known, calibration)
    if is_kept:
        return replace(calibration, origin=f"{calibration.origin}: what was kept holds no more")
    return calibration


def _facts(transport: Transport, formats: Sequence[Format], more: Mapping[str, str]) -> Facts:
    """Return what a calibration holds for, in words; every rank must call it."""
    native_bytes = transport.native_bytes()
    hosts = transport.gather_object(socket.gethostname())
    return {
        "model": str(MODEL),
        # In rank order: a, a, b, b is another network than a, b, a, b.
        "hosts": ", ".join(f"{len([*ranks])} x {host}" for host, ranks in groupby(hosts)),
        "ranks a core": f"{ranks_per_core(transport):.4g}",
        "transport": transport.name,
        "library": transport.library(),
        "kernels": in_use(),
        "formats": ", ".join("+".join(format) for format in formats),
        "messages": "checked" if transport.checks_messages else "as they are",
        # A view of all ranks has another allreduce than they have.
        "allreduce": "of messages" if native_bytes == sys.maxsize else f"own from {native_bytes} B",
        **more,
    }
