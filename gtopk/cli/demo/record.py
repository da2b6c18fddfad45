"""Record: the demo's measurements of one method, an entry of report/results.json.

For links that this machine does not have, the alpha-beta model predicts its step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

from collectives.cost import Link, break_even_bits_per_second
from collectives.cost_model import DEFAULT_RATES, Candidate, Network, predict

from ...compression import GTopK

METHODS = ("dense", "topk", "gtopk", "gtopk-equal-bytes")  # the order of results.json
OVER_LINK = ("dense", "gtopk")  # which stand behind them, where a link was emulated, too

Part = Literal["compute", "select", "communicate"]
PARTS: tuple[Part, ...] = ("compute", "select", "communicate")  # of a step
PART_NAMES: dict[Part, str] = {  # as the report's reader sees them
    "compute": "compute",
    "select": "select + copy",
    "communicate": "communicate",
}


class StepSeconds(TypedDict):
    """Seconds of a step by part (median over steps, mean over ranks), as in StepReport.

    compute:     since the last exchange ended: forward, backward, the optimizer's own step.
    select:      gradients in and out of the bucket, the check that they are finite, accumulate,
                 select, apply; dense copies and checks, too.
    communicate: agree, encode, exchange, merge and decode; waiting for others included.
    """

    compute: float
    select: float
    communicate: float


class Machine(TypedDict):
    """The machine and the transport that the demo ran on."""

    cores: int  # that the ranks may use
    processor: str
    python: str  # versions
    torch: str
    mpi: str  # name and version
    started: str  # ISO 8601


class Record(TypedDict):
    """One method's results."""

    method: str  # one of METHODS
    label: str  # the method in words: "gTop-k, equal k"
    link: str  # that was emulated, in words: "100 Mbit/s"; "": the machine as it is
    accuracy: float  # on the test images after the last epoch, in [0, 1], mean over seeds
    accuracy_by_seed: list[float]  # [seeds]
    accuracy_by_epoch: list[list[float]]  # [seeds][epochs], after epochs 1, 2, ...
    loss_by_epoch: list[list[float]]  # [seeds][1 + epochs], of all training images, from the start
    seconds_by_epoch: list[list[float]]  # [seeds][1 + epochs], spent on training by then; 0 first
    bytes_per_step: float  # that a rank sends, mean over ranks and steps
    bytes_counted: bool  # True: counted on the transport; False: a formula that favours dense
    density: float  # share of the gradient's entries that a rank selects; 1.0 for dense
    seconds: float  # wall clock of one training run, mean over seeds
    step_seconds: StepSeconds
    merge_seconds: float  # of communicate, a median of its own: encode, merge, decode; 0 for dense
    final_replicas_identical: bool  # every rank ended with the same bits, for every seed
    ranks: int
    parameters: int
    selected: int  # k; `parameters` for dense
    epochs: int
    steps: int  # of one training run, all epochs together
    seeds: int
    batch_per_rank: int
    dataset: str  # in words; "digits" for scikit-learn's
    model: str  # in words: "MLP 64-256-256-10"
    machine: Machine


def over_link(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records of dense and gTop-k over the emulated link; none where there was none."""
    return records[len(METHODS) :]


def checked(records: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return the records, or raise ValueError where a method or a field is missing."""
    methods = tuple(record.get("method") for record in records)
    if methods not in (METHODS, METHODS + OVER_LINK):
        raise ValueError(
            f"a report needs one record per method, in the order {METHODS}, and then {OVER_LINK} "
            f"over a link or nothing, got {methods}; "
            "run `gtopk demo` again to write results.json anew"
        )
    for record in records:
        if missing := sorted(Record.__required_keys__ - record.keys()):
            raise ValueError(
                f"the record of method {record['method']!r} lacks {', '.join(missing)}; "
                "run `gtopk demo` again to write results.json anew"
            )
    return [cast("Record", record) for record in records]


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
