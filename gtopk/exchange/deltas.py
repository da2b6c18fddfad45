"""Deltas: what a step changed, compressed and side by side, as the ranks combine it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.algorithms import adasum
from collectives.transports import Transport

from ..buckets.arrays import from_array, to_array
from ..compression import Compressor


class _Fused(NamedTuple):
    """The compressed tensors of one dtype: their places in the list, and all their elements."""

    places: list[int]
    lengths: list[int]
    array: NDArray[Any]


class Deltas:
    """Tensors that become those of all ranks, combined each by itself.

    compressor: its compressed form is what is combined. Raises ValueError where that is not of
    floating-point numbers.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], compressor: type[Compressor]) -> None:
        self._compressor = compressor
        self._compressed = [compressor.compress(tensor) for tensor in tensors]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, (tensor, _) in enumerate(self._compressed):
            by_dtype.setdefault(tensor.dtype, []).append(place)
        others = [str(dtype) for dtype in by_dtype if not dtype.is_floating_point]
        if others:
            raise ValueError(
                f"op=Adasum combines floating-point numbers, and {compressor.__name__} makes "
                f"{', '.join(others)}"
            )
        self._fused = [self._fuse(places) for places in by_dtype.values()]

    def _fuse(self, places: list[int]) -> _Fused:
        arrays = [to_array(self._compressed[place][0]) for place in places]
        return _Fused(places, [array.size for array in arrays], np.concatenate(arrays))

    @property
    def elements(self) -> int:
        """Return how many values they have."""
        return sum(fused.array.size for fused in self._fused)

    def allreduce(self, transport: Transport) -> None:
        """Combine them over the ranks by Adasum."""
        for _, lengths, array in self._fused:
            adasum.allreduce(transport, array, lengths)

    def tensors(self) -> list[torch.Tensor]:
        """Return them decompressed, the same bits on every rank after `allreduce`."""
        decompressed: list[torch.Tensor] = [tensor for tensor, _ in self._compressed]
        for places, lengths, array in self._fused:
            parts = np.split(array, np.cumsum(lengths)[:-1])
            for place, part in zip(places, parts, strict=True):
                compressed, context = self._compressed[place]
                tensor = from_array(part, compressed)
                decompressed[place] = self._compressor.decompress(tensor, context)
        return decompressed
