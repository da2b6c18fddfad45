"""Synthetic extreme multi-label data with a published set's dimensions.

labels     Zipf: the r-th most frequent one is drawn with probability in proportion to 1 / r
rows       log-normal length, with the set's mean; 1 + Poisson labels, with the set's mean before
           duplicates are removed
features   half of a row's entries are drawn from its labels' features, 16 of each label: these can
           be learned; the other half is noise, with a power law
values     log-normal, then each row is scaled to length 1

    python -m models.data.synthetic_xml amazon-670k --train 20000 --test 5000 --folder data

writes files of the old format, whose names begin with "synthetic".
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from .catalogue import Shape, shape_of
from .rows import LabelledRows, LabelLists, SparseRows, concatenated

FEATURES_OF_A_LABEL: Final = 16
LENGTH_SPREAD: Final = 0.6  # standard deviation of the logarithm of rows' lengths
VALUE_SPREAD: Final = 0.5  # the same of values
SKEW: Final = 3.0  # of the random features; larger: fewer features have most of the entries
_ROWS_AT_ONCE: Final = 20_000


def synthesise(shape: Shape, rows: int, seed: int = 0, *, stream: int = 0) -> LabelledRows:
    """Return rows like those of a set.

    seed:   of the relation between features and labels; the same for training and test.
    stream: of the rows; different for training and test.
    """
    random = np.random.default_rng([seed, 1 + stream])
    frequencies = np.cumsum(1 / np.arange(1, shape.labels + 1))
    of_rank = np.random.default_rng(seed).permutation(shape.labels).astype(np.int32)
    parts = []
    for begin in range(0, max(rows, 1), _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, rows - begin)
        labels = _labels(shape, count, frequencies, of_rank, random)
        parts.append(LabelledRows(_features(shape, labels, seed, random), labels, ""))
    return concatenated(parts, f"synthetic, like {shape.name}")


def resized(shape: Shape, features: int, labels: int) -> Shape:
    """Return a smaller shape, for trials, with shorter rows if there are few features."""
    return replace(
        shape,
        name=f"{shape.name} but of {features} features and {labels} labels",
        features=features,
        labels=labels,
        entries_per_row=min(shape.entries_per_row, features / 8),
        labels_per_row=min(shape.labels_per_row, 1 + labels / 8),
    )


def write_xml(path: str | Path, rows: LabelledRows) -> None:
    """Write a file of the old format, values with 6 digits."""
    features, labels = rows.features, rows.labels
    with Path(path).open("w", encoding="ascii") as file:
        file.write(f"{len(rows)} {features.width} {labels.width}\n")
        texts = [f"{i}:{v:.6g}" for i, v in zip(features.indices, features.values, strict=True)]
        names = [str(label) for label in labels.indices]
        for row in range(len(rows)):
            own = names[labels.offsets[row] : labels.offsets[row + 1]]
            entries = texts[features.offsets[row] : features.offsets[row + 1]]
            file.write(f"{','.join(own)} {' '.join(entries)}\n")


def _labels(
    shape: Shape,
    rows: int,
    frequencies: np.ndarray,
    of_rank: np.ndarray,
    random: np.random.Generator,
) -> LabelLists:
    counts = 1 + random.poisson(shape.labels_per_row - 1, rows)
    row = np.repeat(np.arange(rows), counts)
    drawn = random.random(len(row)) * frequencies[-1]
    label = of_rank[np.searchsorted(frequencies, drawn)]
    keys = np.unique(row * shape.labels + label)  # labels drawn twice count once
    offsets = np.searchsorted(keys, np.arange(rows + 1) * shape.labels)
    return LabelLists(offsets, (keys % shape.labels).astype(np.int32), shape.labels)


def draw_lengths(shape: Shape, rows: int, random: np.random.Generator) -> np.ndarray:
    """Return the number of entries in each row."""
    centre = np.log(shape.entries_per_row) - LENGTH_SPREAD**2 / 2
    lengths = np.rint(random.lognormal(centre, LENGTH_SPREAD, rows)).astype(np.int64)
    return lengths.clip(1, max(1, shape.features // 2))


def draw_rows(
    shape: Shape,
    lengths: np.ndarray,
    is_meant: np.ndarray,
    meant: np.ndarray,
    random: np.random.Generator,
) -> SparseRows:
    """Return rows of length 1, with the features `meant` where `is_meant`, others at random."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    chance = (shape.features * random.random(len(row)) ** SKEW).astype(np.int64)
    keys = row * shape.features + np.where(is_meant, meant, chance)
    keys = _made_distinct(keys, row, shape.features, random)
    values = random.lognormal(0, VALUE_SPREAD, len(row))
    values /= np.sqrt(np.bincount(row, values**2, minlength=len(lengths)))[row]
    return SparseRows(
        np.concatenate([[0], np.cumsum(lengths)]),
        (keys % shape.features).astype(np.int32),
        values.astype(np.float32),
        shape.features,
    )


def _features(
    shape: Shape, labels: LabelLists, seed: int, random: np.random.Generator
) -> SparseRows:
    lengths = draw_lengths(shape, len(labels), random)
    row = np.repeat(np.arange(len(labels)), lengths)
    counts = np.diff(labels.offsets)[row]
    label = labels.indices[labels.offsets[row] + random.integers(0, counts)]
    meant = _feature_of(label, random.integers(0, FEATURES_OF_A_LABEL, len(row)), seed, shape)
    return draw_rows(shape, lengths, random.random(len(row)) < 0.5, meant, random)


def _feature_of(label: np.ndarray, number: np.ndarray, seed: int, shape: Shape) -> np.ndarray:
    """Return a label's number-th feature, by a hash, so that no table is needed."""
    x = label.astype(np.uint64) * np.uint64(FEATURES_OF_A_LABEL) + number.astype(np.uint64)
    x += np.uint64(seed) << np.uint64(40)
    for shift in (32, 29):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(32)
    numbers: np.ndarray = (x % np.uint64(shape.features)).astype(np.int64)
    return numbers


def _made_distinct(
    keys: np.ndarray, row: np.ndarray, features: int, random: np.random.Generator
) -> np.ndarray:
    """Return the sorted keys, with duplicates within a row drawn again at random."""
    while True:
        keys.sort()
        twice = np.flatnonzero(keys[1:] == keys[:-1]) + 1
        if not twice.size:
            return keys
        keys[twice] = row[twice] * features + random.integers(0, features, len(twice))


def main() -> None:
    """Write a training and a test file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("like", help="amazon-670k, delicious-200k, delicious")
    parser.add_argument("--train", type=int, default=20_000, help="rows")
    parser.add_argument("--test", type=int, default=5_000, help="rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path())
    arguments = parser.parse_args()
    shape = shape_of(arguments.like)
    for stream, (part, rows) in enumerate((("train", arguments.train), ("test", arguments.test))):
        path = arguments.folder / f"synthetic-{shape.name}-{part}.txt"
        write_xml(path, synthesise(shape, rows, arguments.seed, stream=stream))
        print(f"{path}: {rows} synthetic rows")


if __name__ == "__main__":
    main()
