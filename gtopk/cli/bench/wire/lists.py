"""Lists of entries to encode: positions drawn at random, selected in a training, or from a file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives import SparseVector, accumulate_and_select
from collectives.kernels import clear_at
from collectives.vector import check, index_dtype

from ..selection.gradients import open_source

_STEPS = 12  # until a residual is what error feedback leaves


class Entries(NamedTuple):
    """A vector, and where it comes from."""

    label: str
    vector: SparseVector


def uniform(entries: int, density: float) -> Entries:
    """Return entries whose positions are independent."""
    random = np.random.default_rng(0)
    length = round(entries / density)
    # More than are needed, as some fall together; left out evenly.
    drawn = np.unique(random.integers(0, length, round(entries * (1 + 2 * density)) + 100))
    kept = np.sort(random.choice(drawn, min(entries, drawn.size), replace=False))
    values = random.standard_normal(kept.size, np.float32)
    vector = SparseVector(kept.astype(index_dtype(length)), values, length)
    return Entries("uniform (synthetic)", vector)


def trained(length: int, density: float) -> Entries:
    """Return what a network in training selects, with error feedback."""
    source = open_source("training", length)
    residual, threshold = np.zeros(source.length, np.float32), 0.0
    k = max(1, round(source.length * density))
    for _ in range(_STEPS):
        picked, threshold = accumulate_and_select(residual, source.next_gradient(), k, threshold)
        clear_at(residual, picked.indices)
        source.apply(picked)
    return Entries(source.label, picked)


def from_file(path: Path) -> Entries:
    """Return the `indices`, `values` and `length` of an .npz file; ValueError for anything else."""
    try:
        with np.load(path) as file:
            length = int(file["length"])
            indices = file["indices"].astype(index_dtype(length))
            vector = SparseVector(indices, file["values"].astype(np.float32), length)
    except (OSError, KeyError) as error:
        raise ValueError(
            f"{path} must be an .npz of indices, values and length: {error}"
        ) from error
    return Entries(path.name, check(vector))
