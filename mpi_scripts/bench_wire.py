"""Measure the size, and the time to encode and decode, of the same entries in every format.

python mpi_scripts/bench_wire.py --json wire.json

The entries are drawn at random, or selected in a training.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Run by its path, a script does not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives import SparseVector, accumulate_and_select
from collectives.kernels import clear_at
from collectives.vector import index_dtype
from collectives.wire import EXACT, INDEX_CODES, VALUE_CODES, Format, decode, encode
from gtopk.cli.arguments import Command, from_zero, share, text_stream, whole_number, write_records
from gtopk.cli.bench.harness import add_words, bench_parser
from gtopk.cli.charts import aligned
from gtopk.runtime.machine import load, this_machine
from mpi_scripts.selection_methods import Range, open_source

# Until the residual is typical of error feedback.
_STEPS = 12


class Entries(NamedTuple):
    """A vector's entries, and where they come from."""

    label: str
    vector: SparseVector


def uniform(entries: int, density: float) -> Entries:
    """Return entries whose positions are independent."""
    random = np.random.default_rng(0)
    length = round(entries / density)
    # More than needed, as some coincide; the surplus is left out evenly.
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


FORMATS = tuple(Format(indices, values) for indices in INDEX_CODES for values in VALUE_CODES)
_ENTRIES_A_ROUND = 50_000  # short lists are encoded several times
_MOST_TIMES = 200


class Record(NamedTuple):
    """One format for one list; times are nanoseconds of one thread's processor time.

    index_bits: per entry, header and padding included.
    bound_bits: log2(e / density): what evenly spread positions take.
    pays_below_gbit_per_second: compared with raw+exact, if nothing hides encoding and decoding.
    """

    positions: str
    density: float
    entries: int
    length: int
    indices: str
    values: str
    bytes_per_entry: float
    index_bits: float
    bound_bits: float
    encode_ns: Range  # per entry
    decode_ns: Range
    pays_below_gbit_per_second: float


def measure(entries: Entries, rounds: int) -> list[Record]:
    """Return a record for each format."""
    vector, k = entries.vector, max(1, entries.vector.entries)
    messages = {format: encode(vector, k, format).message for format in FORMATS}
    spent: dict[Format, list[list[float]]] = {format: [[], []] for format in FORMATS}
    # A single short list takes less time than the clock resolves.
    times = min(_MOST_TIMES, math.ceil(_ENTRIES_A_ROUND / k))
    for _ in range(rounds + 1):
        for format, message in messages.items():
            both: tuple[Callable[[], object], ...] = (
                partial(encode, vector, k, format),
                partial(decode, message, vector, k, 0, format),
            )
            for kind, coding in zip(spent[format], both, strict=True):
                kind.append(_nanoseconds(coding, times) / k)
    # The first round warms up.
    taken = {format: [Range.of(kind[1:]) for kind in both] for format, both in spent.items()}
    plain_ns = sum(each.median for each in taken[EXACT])
    records = []
    for format in FORMATS:
        size = messages[format].size
        value_bytes = VALUE_CODES[format.values].size_bytes(vector.entries, vector.values.itemsize)
        saved_bytes = (messages[EXACT].size - size) / k
        encode_ns, decode_ns = taken[format]
        more_ns = encode_ns.median + decode_ns.median - plain_ns
        records.append(
            Record(
                entries.label,
                vector.entries / vector.length,
                vector.entries,
                vector.length,
                format.indices,
                format.values,
                size / k,
                8 * (size - value_bytes) / k,
                math.log2(math.e * vector.length / k),
                encode_ns,
                decode_ns,
                break_even_gbit_per_second(saved_bytes, more_ns),
            )
        )
    return records


def break_even_gbit_per_second(saved_bytes: float, spent_ns: float) -> float:
    """Return the bandwidth below which saving these bytes is worth these nanoseconds."""
    if saved_bytes <= 0:
        return 0.0
    return 8 * saved_bytes / spent_ns if spent_ns > 0 else math.inf


def _nanoseconds(function: Callable[[], object], times: int) -> float:
    begun = time.thread_time_ns()
    for _ in range(times):
        function()
    return (time.thread_time_ns() - begun) / times


def table(records: Sequence[Record]) -> str:
    """Return the records of one list as lines."""
    first = records[0]
    rows = [("format", "bytes", "index bits", "encode", "decode", "pays below")]
    for record in records:
        below = record.pays_below_gbit_per_second
        rows.append(
            (
                f"{record.indices} {record.values}",
                f"{record.bytes_per_entry:.3f}",
                f"{record.index_bits:.2f}",
                record.encode_ns.text(),
                record.decode_ns.text(),
                "" if not below else "any speed" if math.isinf(below) else f"{below:.3g} Gbit/s",
            )
        )
    title = (
        f"{first.positions}: {first.entries:,} of {first.length:,}, density {first.density:.2g}, "
        f"log2(e/density) = {first.bound_bits:.2f} bits"
    )
    return "\n  ".join([title, *aligned(rows)]) + "\n"


def parser() -> Command:
    """Return the command line's grammar."""
    described = bench_parser(
        "python mpi_scripts/bench_wire.py",
        "Encode and decode the same entries in every format: bytes and processor time "
        "per entry, and below which bandwidth a format pays for its work.",
    )
    described.option("--entries", whole_number, 25_600, "entries per message")
    add_words(
        described,
        "--densities",
        share,
        [1e-4, 1e-3, 1e-2, 1e-1],
        metavar="D",
        help="how dense the entries are; default: 0.0001 0.001 0.01 0.1",
    )
    described.option(
        "--elements",
        from_zero,
        6_400_000,
        "also encode the entries that a network of this size selects in training; 0: none",
    )
    described.option("--rounds", whole_number, 21, "timed rounds")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    options = parser().parse_args(arguments)
    machine, say = this_machine(), partial(print, file=text_stream(options.json), flush=True)
    say(", ".join(f"{name}: {value}" for name, value in machine.items()))
    say("nanoseconds of one thread per entry: median of rounds (lowest-highest)\n")
    lists = [partial(uniform, options.entries, density) for density in options.densities]
    if options.elements:
        lists += [partial(trained, options.elements, density) for density in options.densities]
    records: list[Record] = []
    for make in lists:
        found = measure(make(), options.rounds)
        say(table(found))
        records += found
    machine["load_after"] = load()
    write_records({"machine": machine, "records": records}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
