"""Device classes: what a worker computes on decides how it updates the model, and its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch


class DeviceClass(NamedTuple):
    """A kind of worker.

    is_fast: it computes on a copy of the parameters, in large batches, and evaluates losses; else
        on the shared model itself, in small ones.
    """

    name: str
    is_fast: bool


CLASSES: Final[Mapping[str, DeviceClass]] = {
    "cpu": DeviceClass("cpu", is_fast=False),
    "gpu": DeviceClass("gpu", is_fast=True),
    # Ranks on CPUs that stand for the two, to try the modes without a GPU.
    "slow": DeviceClass("slow", is_fast=False),
    "fast": DeviceClass("fast", is_fast=True),
}
NAMES: Final = tuple(CLASSES)  # the number of a class in shared memory is its place here


def class_named(name: str) -> DeviceClass:
    """Return a class; raise ValueError for a name there is none of."""
    if name not in CLASSES:
        raise ValueError(f"a device class must be one of {', '.join(CLASSES)}, got {name!r}")
    return CLASSES[name]


def class_of(parameters: Sequence[torch.Tensor], name: str | None) -> DeviceClass:
    """Return this worker's class: the one it names, else by the device of its parameters.

    Raises ValueError where the parameters' devices do not go with it.
    """
    devices = sorted({parameter.device.type for parameter in parameters})
    if devices not in (["cpu"], ["cuda"]):
        raise ValueError(
            "a worker of hogbatch computes on one device, the CPU or a GPU; its parameters are on "
            f"{', '.join(devices)}"
        )
    on_gpu = devices == ["cuda"]
    chosen = class_named(name or ("gpu" if on_gpu else "cpu"))
    if on_gpu != (chosen.name == "gpu"):
        raise ValueError(
            f"a worker of device class {chosen.name!r} must have its parameters on "
            f"{'a GPU' if chosen.name == 'gpu' else 'the CPU'}, and they are on {devices[0]}"
        )
    return chosen
