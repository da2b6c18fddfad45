"""Contenders: gtopk's own algorithms in every applicable format, and the baselines.

The baseline is the dense allreduce of MPI or gloo, called directly, without gtopk's overhead.
`mpi_scripts/bench_collectives.py` has more baselines.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from collectives import ALGORITHMS, reduce
from collectives.algorithms import Regions, shards
from collectives.algorithms.options import check_names
from collectives.cost_model import EXACT, Candidate, Format, Network, Rates, predict
from collectives.cost_model.schedules import SCHEDULES
from collectives.transports import Transport, local_world
from collectives.vector import Array, SparseVector, index_dtype
from collectives.wire.format import INDEX_CODES, check

from ....compression import Shards
from .library import ModelledLibrary, open_library

# gtopk's own algorithms: those of `reduce`, and shards, which takes no picks.
KNOWN: Final = (*ALGORITHMS, Shards.algorithm)


class Task(NamedTuple):
    """One rank's part in one run of a contender."""

    selected: SparseVector
    k: int
    transport: Transport
    library: ModelledLibrary


Update = SparseVector | Array


class Place(NamedTuple):
    """Inputs of the cost model: vector length, selected entries k, network and rates."""

    length: int
    k: int
    network: Network
    rates: Rates


class Modelled(NamedTuple):
    """Modelled seconds on the wire, seconds to encode, decode and merge, and message rounds."""

    wire_seconds: float
    code_seconds: float
    rounds: int = 0


def _modelled(candidate: Candidate, at: Place) -> Modelled:
    found = predict(candidate, at.length, at.network, at.rates)
    code_seconds = found.code_seconds + found.merge_seconds
    return Modelled(found.communicate_seconds, code_seconds, found.rounds)


@dataclass(frozen=True)
class Contender:
    """One way to reduce the ranks' picks.

    prepare:   returns the function to time.
    modelled:  returns the model's prediction; None without a model.
    selective: whether it reads only the picks, not every coordinate.
    """

    name: str
    label: str
    prepare: Callable[[Task], Callable[[], Update]]
    modelled: Callable[[Place], Modelled | None]
    algorithm: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    format: Format | None = None
    selective: bool = True


def own(algorithm: str, options: dict[str, Any], format: Format) -> Contender:
    """Return one of gtopk's algorithms; oktopk reuses its boundaries, as in training."""
    regions = {"regions": Regions()} if "oktopk" in (algorithm, options.get("across")) else {}
    opened: set[tuple[int, int]] = set()

    def prepare(task: Task) -> Callable[[], Update]:
        selected, k, transport, _ = task
        # Training computes the boundaries once in 64 steps; do it here, outside the timed part.
        if regions and (selected.length, k) not in opened:
            reduce(selected, k, transport, algorithm, format=format, **regions, **options)
            opened.add((selected.length, k))
        return lambda: reduce(
            selected, k, transport, algorithm, format=format, **regions, **options
        )[0]

    def modelled(at: Place) -> Modelled | None:
        # The model covers the algorithms with default options only.
        if algorithm not in SCHEDULES or options:
            return None
        return _modelled(Candidate(algorithm, at.k / at.length, format), at)

    name = " ".join([algorithm, *(f"{name}={value}" for name, value in options.items())])
    if algorithm == "dense":
        label = f"gtopk's own {name}"
        return Contender(name, label, prepare, modelled, algorithm, options, selective=False)
    name += f" {format.indices}+{format.values}"
    return Contender(name, name, prepare, modelled, algorithm, options, format)


def own_shards(options: dict[str, Any]) -> Contender:
    """Return the sharded exchange, one shard per rank; options: keyword arguments of `Shards`."""
    compression = Shards(**options)
    (format,) = compression.formats()

    def prepare(task: Task) -> Callable[[], Update]:
        selected, transport = task.selected, task.transport
        left = np.zeros(selected.length, np.float32)
        left[selected.indices] = selected.values
        indices = shards.shard_indices(0, compression.period, left)
        owned = indices[shards.own_part(indices.size, transport)]
        values, errors = left[indices], np.zeros(owned.size, np.float32)

        def run_once() -> Update:
            shared = shards.reduce(values, errors, transport, code=format.values)
            left[indices] = shared.lost
            left[owned] += shared.kept
            return SparseVector(indices, shared.update, left.size)

        return run_once

    def modelled(at: Place) -> Modelled:
        return _modelled(compression.candidate(format), at)

    name = f"shards period={compression.period} bits={compression.bits}"
    given = {"period": compression.period, "bits": compression.bits}
    return Contender(
        name, name, prepare, modelled, compression.algorithm, given, format, selective=False
    )


def parse(words: str) -> tuple[str, dict[str, Any]]:
    """Parse an algorithm with options, such as "hierarchical:across=gtopk,growth=2.0"."""
    name, _, rest = words.partition(":")
    if name not in KNOWN:
        raise ValueError(f"an algorithm must be one of {', '.join(KNOWN)}; got {name!r}")
    options = {}
    for word in filter(None, rest.split(",")):
        option, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"an option must be written name=value, got {word!r} in {words!r}")
        try:
            # Parse numbers and booleans as Python literals; keep any other word as text.
            options[option] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[option] = value
    if name == Shards.algorithm:
        if unknown := options.keys() - {"period", "bits"}:
            raise ValueError(f"shards take period and bits, got {', '.join(sorted(unknown))}")
        try:
            Shards(**options)
        except TypeError as error:
            raise ValueError(str(error)) from None
    else:
        check_names(name, ALGORITHMS[name], options)
    return name, options


def try_options(words: str, length: int) -> None:
    """Reduce one entry by an algorithm on one rank; raise what it raises for bad options.

    length: of the shortest vector, which limits some options.
    """
    name, options = parse(words)
    if name == Shards.algorithm:  # checked by `parse`
        return
    (alone,) = local_world(1)
    picks = SparseVector(np.zeros(1, index_dtype(length)), np.ones(1, np.float32), length)
    own(name, options, EXACT).prepare(Task(picks, 1, alone, open_library(alone, [0])))()


def to_measure(algorithms: Sequence[str], formats: Sequence[str]) -> list[Format]:
    """Return the formats whose coding must be measured: the given ones and that of shards."""
    found = [format for word in formats for format in formats_of(word)]
    for name, options in map(parse, algorithms):
        if name == Shards.algorithm:
            found += [format._replace(indices="raw") for format in Shards(**options).formats()]
    return [*dict.fromkeys(found)]


def formats_of(word: str) -> list[Format]:
    """Return the formats that match a word: "packed+bf16" one, "bf16" one per index code.

    Raises ValueError for an unknown code.
    """
    indices, plus, values = word.rpartition("+")
    return [check(Format(code, values)) for code in ([indices] if plus else INDEX_CODES)]


def own_contenders(algorithms: Sequence[str], formats: Sequence[str], at: Place) -> list[Contender]:
    """Return gtopk's algorithms, each in every requested format.

    formats: words as for `formats_of`. For a value code alone, use the index code with which the
             model predicts the fastest gtopk here.
    """
    found = [min(formats_of(word), key=lambda f: modelled_gtopk(f, at)) for word in formats]
    contenders = []
    for algorithm, options in map(parse, algorithms):
        if algorithm == "dense":
            contenders.append(own("dense", options, EXACT))
        elif algorithm == Shards.algorithm:
            contenders.append(own_shards(options))
        else:
            contenders += [own(algorithm, options, format) for format in dict.fromkeys(found)]
    return contenders


def modelled_gtopk(format: Format, at: Place) -> float:
    """Return the modelled seconds of gtopk in a format, on the wire and on the cores."""
    candidate = Candidate("gtopk", at.k / at.length, format)
    return predict(candidate, at.length, at.network, at.rates).exchange_seconds


def reference_of(contenders: Sequence[Contender], at: Place) -> str | None:
    """Return the name of the reference for ratios: gtopk in the format the model finds fastest.

    Returns None if no gtopk with default options takes part.
    """
    plain = [c for c in contenders if c.algorithm == "gtopk" and not c.options]
    times = [(modelled_gtopk(c.format, at), c.name) for c in plain if c.format is not None]
    return min(times)[1] if times else None


def dense_library() -> Contender:
    def prepare(task: Task) -> Callable[[], Update]:
        # Touch the pages now: the first write to fresh memory is slow and must not be timed.
        array = np.empty(task.selected.length, np.float32)
        array.fill(0)
        array[task.selected.indices] = task.selected.values

        def run_once() -> Update:
            task.library.allreduce(array)
            return array

        return run_once

    def modelled(at: Place) -> Modelled:
        found = predict(Candidate("dense"), at.length, at.network, at.rates)
        return Modelled(found.communicate_seconds, 0.0)

    return Contender(
        "dense-library", "the library's own dense allreduce", prepare, modelled, selective=False
    )


BASELINES: Final[dict[str, tuple[Contender, ...]]] = {"dense-library": (dense_library(),)}
