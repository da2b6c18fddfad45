"""Calibrated: the calibration of this run, from the cache or measured, the same on every rank.

Recheck: whether the links still are what a kept calibration says, by a few short reductions.

Between hosts only: there may be another network by now, another route, another shaper. It takes a
tenth of a second where the links hold.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np

from .. import environment
from ..kernels import in_use
from ..transports.transport import Transport
from ..wire import EXACT, Format
from .cache import Facts, as_json, cache_path, calibration_from, load, save
from .calibration import Calibration, assumed, measure
from .core_oversubscription import ranks_per_core
from .prediction import Candidate, Prediction, predict
from .probes import Clock, agree_on_mean

WRONG: Final = 2.0  # times what was expected, or one part of it
NEGLIGIBLE_SECONDS: Final = 5e-3  # hosts that are busy take as much longer now and then
LONG_SECONDS: Final = 0.02  # of a reduction that tells of the bandwidth
GOES: Final = 3  # of which the shortest counts
_MANY: Final = 1 << 22  # values


def still_holds(transport: Transport, calibration: Calibration, clock: Clock) -> bool:
    """Tell whether reductions take what they should; every rank must call it, and is told alike."""
    network = calibration.network
    if network.is_one_node:
        return True

    def should_take(length: int) -> Prediction:
        return predict(Candidate("dense"), length, network, calibration.rates)

    def is_right(go: Callable[[], object], expected_seconds: float) -> bool:
        seconds: list[float] = []
        while len(seconds) < GOES and sum(seconds) < 2 * LONG_SECONDS:
            begun = clock()
            go()
            seconds.append(agree_on_mean(transport, clock() - begun))
        off = abs(min(seconds) - expected_seconds)
        return (
            off <= NEGLIGIBLE_SECONDS
            or expected_seconds / WRONG <= min(seconds) <= expected_seconds * WRONG
        )

    many = should_take(_MANY)
    each = (many.communicate_seconds - many.latency_seconds) / _MANY
    # Most of it beyond what a token bucket lets pass at once.
    past_burst = 2 * network.between.burst_bytes / np.float32().itemsize
    length = max(LONG_SECONDS / each if each else 0.0, past_burst)
    array = np.zeros(max(1, min(_MANY, round(length))), np.float32)
    return is_right(transport.barrier, network.expected_agreement_seconds) and is_right(
        lambda: transport.allreduce(array), should_take(array.size).communicate_seconds
    )


# Of what the numbers of a calibration mean: one more whenever that of a field changes, or how it is
# measured, so that what was kept by another meaning is measured anew.
MODEL: Final = 5


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
