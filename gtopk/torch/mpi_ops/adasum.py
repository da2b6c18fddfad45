"""Adasum of tensors: each is combined by itself, those of one dtype in the same messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.algorithms import adasum
from collectives.transports import Transport

from ...runtime.coordinator.fusion import Dense, scale


def combine(denses: Sequence[Dense], transport: Transport) -> None:
    """Combine arrays of floats over the ranks, in their own memory."""
    for dtype in dict.fromkeys(dense.on_host.dtype for dense in denses):
        alike = [dense for dense in denses if dense.on_host.dtype == dtype]
        for dense in alike:
            scale(dense.on_host, dense.prescale)
        lengths = [dense.on_host.size for dense in alike]
        whole = np.concatenate([dense.on_host for dense in alike])
        adasum.allreduce(transport, whole, lengths)
        for dense, part in zip(alike, np.split(whole, np.cumsum(lengths)[:-1]), strict=True):
            dense.on_host[...] = part
            scale(dense.on_host, dense.postscale)
