"""`gtopk bench wire`: bytes, and time to encode and decode, of the same entries in every format.

The entries are drawn at random, selected in a training, or read from a file.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives import SparseVector, accumulate_and_select
from collectives.kernels import clear_at
from collectives.vector import check, index_dtype
from collectives.wire import EXACT, INDEX_CODES, VALUE_CODES, Format, decode, encode

from ..arguments import share
from .harness import add_words, bench_parser, refuse, write_json
from .selection.command import describe
from .selection.methods import open_source

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
    """Return the picks of a network in training, with error feedback."""
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


FORMATS = tuple(Format(indices, values) for indices in INDEX_CODES for values in VALUE_CODES)
_ENTRIES_A_ROUND = 50_000  # short lists are coded several times
_MOST_TIMES = 200


class Record(NamedTuple):
    """One format for one list; times in nanoseconds of one thread's processor time."""

    positions: str
    density: float
    entries: int
    length: int
    indices: str
    values: str
    bytes_per_entry: float  # the whole message
    index_bits: float  # per entry, header and padding included
    bound_bits: float  # log2(e / density): what positions take that are spread evenly
    encode_ns: float  # per entry: the median of the rounds
    encode_ns_low: float
    encode_ns_high: float
    decode_ns: float
    decode_ns_low: float
    decode_ns_high: float
    pays_below_gbit_per_second: float  # against raw and exact, encoding and decoding in line


def measure(entries: Entries, rounds: int) -> list[Record]:
    vector, k = entries.vector, max(1, entries.vector.entries)
    messages = {format: encode(vector, k, format).message for format in FORMATS}
    encoded: dict[Format, list[float]] = {format: [] for format in FORMATS}
    decoded: dict[Format, list[float]] = {format: [] for format in FORMATS}
    times = min(_MOST_TIMES, math.ceil(_ENTRIES_A_ROUND / k))
    for _ in range(rounds + 1):
        for format in FORMATS:
            message = messages[format]
            encoded[format].append(_nanoseconds(_encoding(vector, k, format), times) / k)
            decoded[format].append(_nanoseconds(_decoding(message, vector, k, format), times) / k)
    plain = statistics.median(encoded[EXACT][1:]) + statistics.median(decoded[EXACT][1:])
    plain_bytes = messages[EXACT].size / k
    records = []
    for format in FORMATS:
        encode_ns, decode_ns = encoded[format][1:], decoded[format][1:]  # the first warms up
        size = messages[format].size
        value_bytes = VALUE_CODES[format.values].size_bytes(vector.entries, vector.values.itemsize)
        median = statistics.median(encode_ns), statistics.median(decode_ns)
        records.append(
            Record(
                entries.label,
                vector.entries / vector.length,
                vector.entries,
                vector.length,
                *format,
                size / k,
                8 * (size - value_bytes) / k,
                math.log2(math.e * vector.length / k),
                *(median[0], min(encode_ns), max(encode_ns)),
                *(median[1], min(decode_ns), max(decode_ns)),
                break_even_gbit_per_second(plain_bytes - size / k, sum(median) - plain),
            )
        )
    return records


def break_even_gbit_per_second(saved_bytes: float, spent_ns: float) -> float:
    """Return the bandwidth below which saving so many bytes is worth so many nanoseconds."""
    if saved_bytes <= 0:
        return 0.0
    return 8 * saved_bytes / spent_ns if spent_ns > 0 else math.inf


def _encoding(vector: SparseVector, k: int, format: Format) -> Callable[[], object]:
    return lambda: encode(vector, k, format)


def _decoding(message: object, like: SparseVector, k: int, format: Format) -> Callable[[], object]:
    return lambda: decode(message, like, k, 0, format)  # type: ignore[arg-type]


def _nanoseconds(function: Callable[[], object], times: int) -> float:
    begun = time.thread_time_ns()
    for _ in range(times):
        function()
    return (time.thread_time_ns() - begun) / times


def table(records: Sequence[Record]) -> str:
    """Return the records of one list as lines."""
    first = records[0]
    lines = [
        f"{first.positions}: {first.entries:,} of {first.length:,}, density {first.density:.2g}, "
        f"log2(e/density) = {first.bound_bits:.2f} bits",
        f"  {'format':16} {'bytes':>7} {'index bits':>10} {'encode':>19} {'decode':>19} "
        f"{'pays below':>13}",
    ]
    for record in records:
        below = record.pays_below_gbit_per_second
        pays = "" if below == 0 else "any speed" if math.isinf(below) else f"{below:.3g} Gbit/s"
        encode_ns = (
            f"{record.encode_ns:.2f} ({record.encode_ns_low:.2f}-{record.encode_ns_high:.2f})"
        )
        decode_ns = (
            f"{record.decode_ns:.2f} ({record.decode_ns_low:.2f}-{record.decode_ns_high:.2f})"
        )
        lines.append(
            f"  {record.indices + ' ' + record.values:16} {record.bytes_per_entry:7.3f} "
            f"{record.index_bits:10.2f} {encode_ns:>19} {decode_ns:>19} {pays:>13}"
        )
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = bench_parser(
        "wire",
        "Encode and decode the same entries in every format: bytes and processor time "
        "per entry, and below which bandwidth a format pays for its work.",
    )
    described.add_argument(
        "--entries", type=int, default=25_600, help="entries per message; default: %(default)s"
    )
    add_words(
        described,
        "--densities",
        share,
        [1e-4, 1e-3, 1e-2, 1e-1],
        metavar="D",
        help="shares of the vector that the entries are; default: 0.0001 0.001 0.01 0.1",
    )
    described.add_argument(
        "--elements",
        type=int,
        default=6_400_000,
        help="also encode the entries that a network of this size selects in training; 0: none; "
        "default: %(default)s",
    )
    files = "also encode the entries in these .npz files (arrays indices, values, length)"
    add_words(described, "--files", Path, [], metavar="FILE", help=files)
    described.add_argument(
        "--rounds", type=int, default=21, help="timed rounds; default: %(default)s"
    )
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    options = parser().parse_args(arguments)
    if min(options.entries, options.rounds) < 1 or options.elements < 0:
        return refuse("wire", "--entries and --rounds must be at least 1, --elements at least 0")
    try:
        given = [from_file(path) for path in options.files]
    except ValueError as error:
        return refuse("wire", str(error))
    machine = describe()
    print(", ".join(f"{name}: {value}" for name, value in machine.items()))
    print("nanoseconds of one thread per entry: median of rounds (lowest-highest)\n")
    records: list[Record] = []
    for entries in _lists(options, given):
        found = measure(entries, options.rounds)
        print(table(found), flush=True)
        records += found
    written = {"machine": machine, "records": [_as_json(record) for record in records]}
    write_json(written, options.json)
    return 0


def _lists(options: argparse.Namespace, given: list[Entries]) -> list[Entries]:
    drawn = [uniform(options.entries, density) for density in options.densities]
    picked = [trained(options.elements, d) for d in options.densities if options.elements]
    return drawn + picked + given


def _as_json(record: Record) -> dict[str, object]:
    """Return the fields; JSON knows no infinity, so a format that always pays has none there."""
    fields = record._asdict()
    if math.isinf(record.pays_below_gbit_per_second):
        fields["pays_below_gbit_per_second"] = None
    return fields
