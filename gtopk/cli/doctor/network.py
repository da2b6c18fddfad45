"""Measures the links between the running ranks, and whether compression would pay on them.

Runs in the ranks' children, after they have come together; what it returns is printed as it is.
"""

from __future__ import annotations

from typing import Final

from collectives.cost import Link
from collectives.cost_model import Budget, Calibration, Prediction, calibrate, choose
from collectives.cost_model.schedules import FORMATS
from collectives.transports import Transport

from ... import __version__

MODEL, LENGTH, DENSITY = "ResNet-50", 25_557_032, 0.001
_EXACT: Final = [format for format in FORMATS if format.values == "exact"]


def describe_network(transport: Transport) -> str:
    """Return a sentence on the links, and one on what pays; every rank must call it."""
    calibration = calibrate(transport, FORMATS, {"gtopk": __version__})
    return describe(calibration)


def describe(calibration: Calibration) -> str:
    """Return the meaning of a calibration for a model of a well-known size."""
    network = calibration.network
    links = []
    if network.ranks > network.ranks_per_node:
        links.append(f"between hosts {_link(network.between)}")
    if network.within is not None:
        links.append(f"inside a host {_link(network.within)}")
    choices = choose(LENGTH, calibration, Budget(density=DENSITY), _EXACT)
    seconds = {each.candidate.algorithm: each for each in reversed(choices)}
    dense, best = seconds.pop("dense"), min(seconds.values(), key=lambda each: each.seconds)
    pays = choices[0].candidate.algorithm != "dense"
    step = (
        f"a step of {MODEL}'s size at density {DENSITY:g} would take "
        f"{_milliseconds(dense)} dense, {_milliseconds(best)} by {best.candidate.algorithm}: "
        f"compression {'pays' if pays else 'would not pay'} here ({calibration.origin})"
    )
    return f"{', '.join(links)}; {step}" if links else step


def _link(link: Link) -> str:
    return f"{link.bits_per_second / 1e9:.3g} Gbit/s and {1e6 * link.latency_seconds:.3g} us"


def _milliseconds(found: Prediction) -> str:
    return f"{1e3 * found.seconds:.3g} ms"
