"""The calibration of a transport: measured once, in the first call."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import torch

from collectives.cost_model import Calibration, calibrate
from collectives.cost_model.network import Rates
from collectives.cost_model.per_call_overhead import DENSITY
from collectives.cost_model.probes import agree_on_slowest
from collectives.cost_model.schedules import FORMATS
from collectives.kernels import clear_at
from collectives.transports import Transport

from .. import __version__
from .buckets.arrays import Timestamp, current_stream, located
from .residual import Residual

_ELEMENTS: Final = 1 << 22  # of the gradient used to measure a GPU
# The first rounds have no threshold yet and compile the kernels.
_WARM_UP, _ROUNDS = 3, 5
_HOST: Final = torch.device("cpu")

# Weak keys: a calibration is dropped together with its transport.
_of_transport: WeakKeyDictionary[Transport, Calibration] = WeakKeyDictionary()


def calibration_of(transport: Transport, device: torch.device = _HOST) -> Calibration:
    """Return the calibration; the first call measures it, a collective.

    device: of this rank's buckets. The rates of host kernels are cached between runs;
        those of GPU kernels are measured in every run.
    """
    # Not keyed by `device`: devices may differ between ranks, but all must measure here or none.
    if transport not in _of_transport:
        calibration = calibrate(transport, FORMATS, facts={"gtopk": __version__})
        rates = _slowest_rates(calibration.rates, transport, device)
        _of_transport[transport] = replace(calibration, rates=rates)
    return _of_transport[transport]


def _slowest_rates(rates: Rates, transport: Transport, device: torch.device) -> Rates:
    """Return the slowest rank's rates, each for the device of its buckets; equal on all ranks."""
    own_seconds = [rates.select_seconds, rates.pick_seconds, rates.copy_seconds]
    if device.type != "cpu":
        own_seconds = measure_on(device)
    select, pick, copy = agree_on_slowest(transport, own_seconds)
    return rates._replace(select_seconds=select, pick_seconds=pick, copy_seconds=copy)


def measure_on(device: torch.device) -> list[float]:
    """Return a device's seconds: to select, per element; per picked entry; to copy, per element."""
    with current_stream(device)():
        residual = Residual(_ELEMENTS, np.dtype(np.float32), device=device)
        gradient = torch.randn(_ELEMENTS, dtype=torch.float32, device=device)
        flat = torch.empty_like(gradient)

        def select() -> None:
            picked = residual.accumulate_and_select(located([gradient]), round(_ELEMENTS * DENSITY))
            clear_at(residual.values, picked.indices)
            flat.zero_()  # as a step does before it writes the update

        # As in a dense step: into one buffer, weighted, and back.
        def copy() -> None:
            flat.copy_(gradient)
            flat.mul_(1.0)
            gradient.copy_(flat)

        return [_seconds(select, device) / _ELEMENTS, 0.0, _seconds(copy, device) / _ELEMENTS]


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    rounds = []
    for _ in range(_WARM_UP + _ROUNDS):
        begun = Timestamp(device)
        work()
        rounds.append(begun.seconds_until(Timestamp(device)))
    return statistics.median(rounds[_WARM_UP:])
