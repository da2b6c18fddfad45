"""What the alpha-beta model says of a step on links that this machine does not have."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from collectives.cost import Link, break_even_bits_per_second
from collectives.planning import DEFAULT_RATES, Candidate, Network, predict

from ...compression import GTopK
from .record import Record

LATENCY_SECONDS = 50e-6  # assumed: a message over Ethernet and a kernel's TCP

GTOPK = GTopK()
AS_SENT = GTOPK.formats()[0]  # the format of the sparse methods, which is the default
ALGORITHMS = {
    "dense": "dense",
    "topk": "topk-allgather",
    "gtopk": "gtopk",
    "gtopk-equal-bytes": "gtopk",
}


def shared_compute_seconds(records: Sequence[Record]) -> float:
    """Return the measured compute time, one for all: network and batch are the same.

    The median over the methods, so that the noise of one of them decides no comparison.
    """
    return statistics.median(record["step_seconds"]["compute"] for record in records)


def modelled_step_seconds(record: Record, compute_seconds: float, link: Link) -> float:
    """Return compute, select and merge as measured plus the wire as modelled, not overlapped."""
    density = record["selected"] / record["parameters"]
    algorithm = ALGORITHMS[record["method"]]
    widening = GTOPK.growth if algorithm == "gtopk" else 1.0
    wire = predict(
        Candidate(algorithm, density, AS_SENT, widening),
        record["parameters"],
        Network(record["ranks"], link),
        DEFAULT_RATES,  # of which only the wire's part is used
    ).communicate_seconds
    return compute_seconds + record["step_seconds"]["select"] + record["merge_seconds"] + wire


def pays_below(dense: Record, sparse: Record) -> float | None:
    """Return the bits per second below which `sparse` is modelled to be faster.

    None: at no bandwidth; infinity: at all of them.
    """
    return break_even_bits_per_second(
        lambda link: modelled_step_seconds(dense, 0.0, link),
        lambda link: modelled_step_seconds(sparse, 0.0, link),
        LATENCY_SECONDS,
    )
