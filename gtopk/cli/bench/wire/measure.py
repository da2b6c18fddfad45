"""Time encode and decode of each format, in turn, round by round, and count what they send."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from collectives import SparseVector
from collectives.wire import EXACT, INDEX_CODES, VALUE_CODES, Format, decode, encode

from .lists import Entries

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
    """Return a record of each format."""
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
