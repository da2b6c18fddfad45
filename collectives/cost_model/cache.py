"""The calibration of this run, from its file or measured, the same on every rank.

A calibration is cached as a small JSON file for the hosts that it was measured on:

    {"facts": what it depends on, "saved": seconds since 1970, "calibration": ...}

A file that is damaged, old or for other facts is ignored: measuring again takes seconds. Only the
newest files in the cache's folder are kept, as containers may have new host names each day, and
their files are never read again.

Before a cached calibration is used, a few short reductions check its links between hosts, since the
network, a route or a traffic shaper may have changed. That takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import environment
from ..cost import Link
from ..kernels import in_use
from ..transports.transport import Transport
from ..wire import EXACT, Format
from .calibration import Calibration, assumed, measure
from .network import CodingRate, Network, Rates, ranks_per_core
from .prediction import Candidate, Prediction, predict
from .probes import Clock, agree_on_mean

OLDEST_SECONDS: Final = 7 * 86400.0
MOST_FILES: Final = 64
# With a number at its end: the temporary file of a process that was killed while writing.
_NAME: Final = re.compile(r"calibration-[0-9a-f]{16}\.json(\.\d+)?")

Facts = Mapping[str, str]


def cache_path(facts: Facts) -> Path | None:
    """Return the cache file for these facts; None without a home folder."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # in some containers HOME is unset and the user id has no account
        return None
    digest = hashlib.blake2b(json.dumps(dict(facts), sort_keys=True).encode(), digest_size=8)
    return Path(base, "gtopk", f"calibration-{digest.hexdigest()}.json")


def load(path: Path, facts: Facts, ranks: int) -> Calibration | None:
    """Return the calibration saved for these facts and ranks; None without a valid one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        age_seconds = time.time() - record["saved"]
        # A file from the future, written before a clock was set back, would never expire.
        if record["facts"] != dict(facts) or not 0 <= age_seconds < OLDEST_SECONDS:
            return None
        found = calibration_from(record["calibration"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
        return None
    except RecursionError:  # deeply nested brackets
        return None
    return found if found.network.ranks == ranks else None


def save(path: Path, facts: Facts, calibration: Calibration) -> bool:
    """Write a temporary file and rename it; return False if that fails."""
    if not path.name:  # "." and "/" have none
        return False
    record = {"facts": dict(facts), "saved": time.time(), "calibration": as_json(calibration)}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
        _remove_oldest(path)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):  # after the rename it is gone
            temporary.unlink()
    return True


def _remove_oldest(written: Path) -> None:
    """Remove all but the newest files beside the one written, if that is in the cache's folder."""
    if not _NAME.fullmatch(written.name):  # GTOPK_CALIBRATION names a file elsewhere
        return

    def modified_at(path: Path) -> float:
        with contextlib.suppress(OSError):  # another process has removed it
            return path.stat().st_mtime
        return 0.0

    found = [path for path in written.parent.iterdir() if _NAME.fullmatch(path.name)]
    for path in sorted(found, key=modified_at, reverse=True)[MOST_FILES:]:
        with contextlib.suppress(OSError):
            path.unlink()


def as_json(calibration: Calibration) -> dict[str, Any]:
    network, rates = calibration.network, calibration.rates
    return {
        "origin": calibration.origin,
        "network": network._asdict(),
        "rates": {
            **rates._asdict(),
            "coding": [[*format, *rate] for format, rate in rates.coding.items()],
        },
    }


def calibration_from(record: Mapping[str, Any]) -> Calibration:
    """Return the calibration that `as_json` wrote.

    Raises ValueError, TypeError, KeyError, AttributeError or ArithmeticError for anything else.
    """
    network, rates = dict(record["network"]), record["rates"]
    for name in ("between", "within", "allreduce"):
        if network[name] is not None:
            network[name] = Link(*map(_seconds, network[name]))
    if network["agreement_seconds"] is not None:
        network["agreement_seconds"] = _seconds(network["agreement_seconds"])
    for name, least in (("ranks", 1), ("ranks_per_node", 1), ("native_bytes", 0)):
        is_none = name.endswith("bytes") and network[name] is None
        # Not isinstance, for which True is an int.
        if not is_none and (type(network[name]) is not int or network[name] < least):
            raise ValueError(
                f"{name} must be a whole number of at least {least}, got {network[name]!r}"
            )
    sharing = network["ranks_per_core"]
    if type(sharing) not in (int, float) or not 1 <= sharing < math.inf:
        raise ValueError(f"ranks_per_core must be a number of at least 1, got {sharing!r}")
    link = network["between"]
    if link is None or (link.burst_bytes and not link.seconds_per_byte):
        raise ValueError("a network needs a link, and a link with a burst needs a bandwidth")
    coding = {
        Format(indices, values): CodingRate(_seconds(encode), _seconds(decode))
        for indices, values, encode, decode in rates["coding"]
    }
    seconds = {name: _seconds(rates[name]) for name in Rates._fields if name != "coding"}
    return Calibration(
        Network(**network),
        Rates(coding=coding, **seconds),
        str(record["origin"]),
    )


def _seconds(number: Any) -> float:
    seconds = float(number)
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"seconds must be finite and not negative, got {number!r}")
    return seconds


MAX_DEVIATION: Final = 2.0  # a link has changed if its time is off by this factor, up or down
NEGLIGIBLE_SECONDS: Final = 5e-3  # smaller differences are ignored: hosts may be busy
LONG_SECONDS: Final = 0.02  # expected time of the reduction that checks the bandwidth
RUNS: Final = 3  # of which the shortest counts
_LONG_LENGTH: Final = 1 << 22  # values


def links_unchanged(transport: Transport, calibration: Calibration, clock: Clock) -> bool:
    """Tell whether reductions take as long as predicted; a collective, the same on all ranks."""
    network = calibration.network
    if network.is_one_node:
        return True

    def expected(length: int) -> Prediction:
        return predict(Candidate("dense"), length, network, calibration.rates)

    def is_right(run: Callable[[], object], expected_seconds: float) -> bool:
        seconds: list[float] = []
        while len(seconds) < RUNS and sum(seconds) < 2 * LONG_SECONDS:
            begun = clock()
            run()
            # All ranks get the same mean, so they all continue, or none does.
            seconds.append(agree_on_mean(transport, clock() - begun))
        error = abs(min(seconds) - expected_seconds)
        return (
            error <= NEGLIGIBLE_SECONDS
            or expected_seconds / MAX_DEVIATION <= min(seconds) <= expected_seconds * MAX_DEVIATION
        )

    longest = expected(_LONG_LENGTH)
    value_seconds = (longest.communicate_seconds - longest.latency_seconds) / _LONG_LENGTH
    # Long enough that a token bucket's burst is at most half of it.
    past_burst = 2 * network.between.burst_bytes / np.float32().itemsize
    length = max(LONG_SECONDS / value_seconds if value_seconds else 0.0, past_burst)
    array = np.zeros(max(1, min(_LONG_LENGTH, round(length))), np.float32)
    return is_right(transport.barrier, network.expected_agreement_seconds) and is_right(
        lambda: transport.allreduce(array), expected(array.size).communicate_seconds
    )


# The version of the cost model. Increased whenever the meaning of a field, or the way it is
# measured, changes, so that older files are not used.
MODEL: Final = 5


def calibrate(
    transport: Transport,
    formats: Sequence[Format] = (EXACT,),
    facts: Mapping[str, str] | None = None,
    clock: Clock = time.perf_counter,
) -> Calibration:
    """Return the calibration; every rank must call it, and all get rank 0's.

    A cached calibration is used if the links still behave as measured; otherwise all is measured.
    facts: what else it depends on, such as versions, besides hosts, transport, kernels and formats.
    GTOPK_CALIBRATION=off assumes Gigabit Ethernet and measures nothing; =fresh always measures;
    =PATH keeps the cache in that file. Without it the cache is in XDG_CACHE_HOME, or in the home
    folder's .cache; without a home folder nothing is kept.
    """
    setting = environment.calibration()  # only rank 0's is used
    mode = setting.lower()
    # A collective, so before anything that depends on rank 0's own setting.
    all_facts = _facts(transport, formats, facts or {})
    found, path, is_cached = None, None, False
    if transport.rank == 0 and mode == "off":
        found = assumed(transport.size)
    elif transport.rank == 0:
        path = cache_path(all_facts) if mode in ("", "fresh") else Path(setting)
    if path is not None and mode != "fresh":
        found = load(path, all_facts, transport.size)
        if is_cached := found is not None:
            found = replace(found, origin=f"{found.origin}, cached in {path}")
    record, is_cached = transport.broadcast_object([as_json(found) if found else None, is_cached])
    if record is not None:
        cached = calibration_from(record)
        # All ranks decide alike: both were broadcast, and `links_unchanged` agrees.
        if not is_cached or links_unchanged(transport, cached, clock):
            return cached
    calibration = measure(transport, formats, clock)
    if path is not None:
        save(path, all_facts, calibration)
    if is_cached:
        return replace(calibration, origin=f"{calibration.origin}: the cached one is out of date")
    return calibration


def _facts(transport: Transport, formats: Sequence[Format], others: Mapping[str, str]) -> Facts:
    """Return the facts that a calibration depends on, as texts; every rank must call it."""
    native_bytes = transport.native_bytes()
    hosts = transport.gather_object(socket.gethostname())
    return {
        "model": str(MODEL),
        # In rank order, as a, a, b, b is another network than a, b, a, b.
        "hosts": ", ".join(f"{len([*ranks])} x {host}" for host, ranks in groupby(hosts)),
        "ranks a core": f"{ranks_per_core(transport):.4g}",
        "transport": transport.name,
        "library": transport.library(),
        "kernels": in_use(),
        "formats": ", ".join("+".join(format) for format in formats),
        "messages": "checked" if transport.checks_messages else "as they are",
        # A subset of all ranks may have another allreduce than the transport itself.
        "allreduce": "of messages" if native_bytes == sys.maxsize else f"own from {native_bytes} B",
        **others,
    }
