"""Replicas: whether the ranks' parameters are still the same, to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from collectives.errors import MismatchError
from collectives.kernels.codes import checksum
from collectives.transports import Transport

from ...exchange.buckets.arrays import as_bytes
from ...runtime.coordinator.agreement import name_ranks

# Said of ranks whose replica was not finite, and became the others' model: nobody knows the rest.
BUFFERS_STAY: Final = (
    "buffers (BatchNorm's means) stay as they are there: between epochs, broadcast another rank's"
)


class Parted(NamedTuple):
    """A parameter whose bits are not the same on all ranks; sides: checksums, and who has them."""

    name: str
    sides: dict[int, list[int]]

    def describe(self) -> str:
        """Return the parameter and both sides, as errors say them."""
        sides = "; ".join(f"{name_ranks(ranks)}: {bits:016x}" for bits, ranks in self.sides.items())
        return f"parameter '{self.name}' has the checksums {sides}"

    def majority(self) -> list[int] | None:
        """Return the ranks of the side that more than half of all are on, if there is one."""
        most = max(self.sides.values(), key=len)
        return most if 2 * len(most) > sum(map(len, self.sides.values())) else None


def checksums(parameters: Iterable[torch.Tensor]) -> np.ndarray:
    """Return a checksum of each parameter's bits, uint64 [parameters]."""
    return np.array([checksum(_bits_of(parameter)) for parameter in parameters], np.uint64)


def compare(transport: Transport, own: np.ndarray, names: Sequence[str]) -> list[Parted]:
    """Return what parted, the same on every rank; all ranks call it together, with checksums."""
    rows = [row.view(np.uint64) for row in transport.allgather(own.view(np.uint8))]
    found = []
    for place, name in enumerate(names):
        sides: dict[int, list[int]] = {}
        for rank, row in zip(transport.ranks, rows, strict=True):
            sides.setdefault(int(row[place]), []).append(rank)
        if len(sides) > 1:
            found.append(Parted(name, sides))
    return found


def require_the_same(transport: Transport, own: np.ndarray, names: Sequence[str]) -> None:
    """Raise MismatchError, on every rank alike, that names the first parameter that differs."""
    if parted := compare(transport, own, names):
        raise MismatchError(
            f"the replicas are no longer the same: {parted[0].describe()}; begin with "
            "broadcast_parameters, and change parameters alike on all ranks"
        )


def _bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory in the order of its elements, uint8."""
    bits: np.ndarray = as_bytes(tensor.detach().cpu()).numpy()
    return bits
