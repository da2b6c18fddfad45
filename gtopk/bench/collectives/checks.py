"""Checks: no contender that computes something wrong gets a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from collectives.errors import CollectiveError
from collectives.transports import Transport
from collectives.vector import Array, SparseVector

from .contenders import Outcome


class WrongResultError(CollectiveError):
    """A reduction gave a wrong result; its time means nothing."""


def digest(update: SparseVector | Array) -> Array:
    """Return what two updates share when they are the same to the bit, uint8 [16]."""
    hashed = hashlib.blake2b(digest_size=16)
    parts = (update.indices, update.values) if isinstance(update, SparseVector) else (update,)
    for array in parts:
        hashed.update(np.ascontiguousarray(array).view(np.uint8).data)
    return np.frombuffer(hashed.digest(), np.uint8)


def check_agreement(name: str, digests: Sequence[Array]) -> None:
    """Raise WrongResultError unless all ranks have the same update."""
    differ = [rank for rank, each in enumerate(digests) if (each != digests[0]).any()]
    if differ:
        raise WrongResultError(
            f"{name} must leave the same update on all ranks; rank {differ[0]} has another"
        )


def check_conservation(
    name: str, everyones_picks: Sequence[SparseVector], outcome: Outcome, transport: Transport
) -> None:
    """Raise WrongResultError unless what was selected is in the update or has returned.

    Coordinate by coordinate, up to the rounding of the additions. All ranks must call it.
    """
    update, returned = outcome
    if not isinstance(update, SparseVector):
        update = SparseVector.from_dense(update)
    if returned is None:
        returned = SparseVector.empty(update.length)
    after = [update, *_of_all_ranks(returned, transport)]
    indices = np.concatenate([vector.indices for vector in (*everyones_picks, *after)])
    places, place = np.unique(indices, return_inverse=True)
    before = [vector.values.astype(np.float64) for vector in everyones_picks]
    taken = [-vector.values.astype(np.float64) for vector in after]
    lost = np.bincount(place, np.concatenate([*before, *taken]), places.size)
    there = place[: sum(vector.entries for vector in everyones_picks)]
    total = np.bincount(there, np.abs(np.concatenate(before)), places.size)
    bound = len(everyones_picks) * float(np.finfo(np.float32).eps) * total
    wrong = np.flatnonzero(np.abs(lost) > bound)
    if wrong.size:
        raise WrongResultError(
            f"{name} must lose nothing of what is selected; at {wrong.size} coordinates it does, "
            f"the first is {places[wrong[0]]}, where {lost[wrong[0]]:g} are missing"
        )


def _of_all_ranks(vector: SparseVector, transport: Transport) -> list[SparseVector]:
    gathered = [
        transport.allgather(np.ascontiguousarray(part).view(np.uint8))
        for part in (vector.indices, vector.values)
    ]
    return [
        SparseVector(
            np.frombuffer(indices.tobytes(), vector.indices.dtype),
            np.frombuffer(values.tobytes(), vector.values.dtype),
            vector.length,
        )
        for indices, values in zip(*gathered, strict=True)
    ]
