"""Cache: a calibration as a small file of JSON, kept for the hosts it was measured on.

    {"facts": what it holds for, "saved": seconds since 1970, "calibration": ...}

A file that is damaged, old or about other facts is as good as none: measuring again takes seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..cost import Link
from ..wire import Format
from .calibration import Calibration
from .network import Network
from .rates import CodingRate, Rates

OLDEST_SECONDS: Final = 7 * 86400.0

Facts = Mapping[str, str]


def cache_path(facts: Facts) -> Path | None:
    """Return the file for a calibration that holds for these facts; None without a home folder."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an account of this user id, as in some containers
        return None
    digest = hashlib.blake2b(json.dumps(dict(facts), sort_keys=True).encode(), digest_size=8)
    return Path(base, "gtopk", f"calibration-{digest.hexdigest()}.json")


def load(path: Path, facts: Facts, ranks: int) -> Calibration | None:
    """Return what was saved for these facts and ranks; None where nothing is to be trusted."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        age_seconds = time.time() - record["saved"]
        if record["facts"] != dict(facts) or not 0 <= age_seconds < OLDEST_SECONDS:
            return None
        found = calibration_from(record["calibration"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
        return None
    except RecursionError:  # brackets in brackets
        return None
    return found if found.network.ranks == ranks else None


def save(path: Path, facts: Facts, calibration: Calibration) -> bool:
    """Write the file beside its place, then move it there; tell whether that worked.

    Nothing stays beside it, whatever ends the writing.
    """
    if not path.name:  # "." and "/" have none
        return False
    record = {"facts": dict(facts), "saved": time.time(), "calibration": as_json(calibration)}
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):  # where it was moved it is not there any more
            beside.unlink()
    return True


def as_json(calibration: Calibration) -> dict[str, Any]:
    """Return a calibration in the types of JSON."""
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
    """Return what `as_json` wrote.

    Raises ValueError, TypeError, KeyError, AttributeError or ArithmeticError for anything else.
    """
    network, rates = dict(record["network"]), record["rates"]
    for name in ("between", "within", "allreduce"):
        if network[name] is not None:
            network[name] = Link(*map(_seconds, network[name]))
    if network["agreement_seconds"] is not None:
        network["agreement_seconds"] = _seconds(network["agreement_seconds"])
    for name, least in (
        ("ranks", 1),
        ("ranks_per_node", 1),
        ("native_bytes", 0),
    ):
        is_none = name.endswith("bytes") and network[name] is None
        if not is_none and (type(network[name]) is not int or network[name] < least):
            raise ValueError(
                f"{name} must be a whole number from {least} on, got {network[name]!r}"
            )
    crowding = network["ranks_per_core"]
    if type(crowding) not in (int, float) or not 1 <= crowding < math.inf:
        raise ValueError(f"ranks_per_core must be a number from 1 on, got {crowding!r}")
    link = network["between"]
    if link is None or (link.burst_bytes and not link.seconds_per_byte):
        raise ValueError("a network needs a link, and a link with a burst a bandwidth")
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
