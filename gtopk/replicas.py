"""Replicas: whether the ranks' parameters are still the same, to the bit."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from collectives.errors import MismatchError
from collectives.transports import Transport

from .agreement import name_ranks


def checksums(parameters: Iterable[torch.Tensor]) -> np.ndarray:
    """Return a checksum of each parameter's bits, uint32 [parameters]."""
    return np.array([zlib.crc32(_bits_of(parameter).data) for parameter in parameters], np.uint32)


def compare(
    transport: Transport, own: np.ndarray, parameters: Mapping[torch.nn.Parameter, str]
) -> None:
    """Raise MismatchError, on every rank alike, that names the first parameter that differs."""
    rows = [row.view(np.uint32) for row in transport.allgather(own.view(np.uint8))]
    for place, name in enumerate(parameters.values()):
        ranks: dict[int, list[int]] = {}
        for rank, row in enumerate(rows):
            ranks.setdefault(int(row[place]), []).append(rank)
        if len(ranks) > 1:
            sides = "; ".join(f"{name_ranks(same)}: {bits:08x}" for bits, same in ranks.items())
            raise MismatchError(
                f"the replicas are no longer the same: parameter '{name}' has the checksums "
                f"{sides}; begin with broadcast_parameters, and change parameters alike on all "
                "ranks"
            )


def _bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory in the order of its elements, uint8."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    bits: np.ndarray = flat.view(torch.uint8).numpy()
    return bits
