"""Verdicts on the demo's records as text, which report losses as plainly as gains.

Record: the demo's measurements of one method, an entry of report/results.json.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

from ...units import digits, percent_text, seconds_text

METHODS = ("dense", "topk", "gtopk", "gtopk-equal-bytes")  # the order of results.json
OVER_LINK = ("dense", "gtopk")  # follow them if a link was emulated

# Parts of a step. compute: since the last exchange ended. select: copy gradients into and out of
# the bucket, check that they are finite, accumulate, select, apply. communicate: agree, encode,
# exchange, merge and decode, including waiting for others.
PARTS = ("compute", "select", "communicate")


class Record(TypedDict):
    """One method's results."""

    method: str  # one of METHODS
    label: str  # the method in words: "gTop-k, equal k"
    link: str  # the emulated link as text, "100 Mbit/s"; "": none
    accuracy: float  # on the test images after the last epoch, in [0, 1], mean over seeds
    accuracy_by_seed: list[float]  # [seeds]
    accuracy_by_epoch: list[list[float]]  # [seeds][epochs], after epochs 1, 2, ...
    loss_by_epoch: list[list[float]]  # [seeds][1 + epochs], over all training images
    seconds_by_epoch: list[list[float]]  # [seeds][1 + epochs], training time so far; starts with 0
    bytes_per_step: float  # sent by a rank, mean over ranks and steps
    bytes_counted: bool  # True: counted on the transport; False: a formula that favours dense
    density: float  # fraction of the gradient's entries that a rank selects; dense: 1.0
    seconds: float  # wall clock of one training run, mean over seeds
    step_seconds: dict[str, float]  # by PARTS: median over steps, mean over ranks
    merge_seconds: float  # part of communicate: encode, merge, decode; 0 for dense
    final_replicas_identical: bool  # every rank ended with the same bits, for every seed
    ranks: int
    parameters: int
    selected: int  # k; `parameters` for dense
    epochs: int
    steps: int  # in all epochs of one training run
    seeds: int
    batch_per_rank: int
    dataset: str  # in words; "digits" for scikit-learn's
    model: str  # in words: "MLP 64-256-256-10"
    machine: dict[str, Any]  # of gtopk.runtime.machine, and the versions of torch and MPI


def over_link(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records of dense and gTop-k over the emulated link; empty without one."""
    return records[len(METHODS) :]


BELOW = 0.01  # dense's final accuracy minus this, rounded down to a per cent, is the level to reach


def level(dense: Record) -> float:
    """Return the accuracy to reach: 0.96 if dense ends at 0.972."""
    # 1e-9: in floats, 100 * (0.57 - 0.01) is just below 56.
    return math.floor(100 * (dense["accuracy"] - BELOW) + 1e-9) / 100


def epochs_text(accuracy: float, record: Record) -> str:
    """Return the epochs until the mean over seeds first reaches `accuracy`: "19", or "> 30"."""
    by_epoch = zip(*record["accuracy_by_epoch"], strict=True)
    means = enumerate(map(statistics.fmean, by_epoch), start=1)
    reached = (str(epoch) for epoch, mean in means if mean >= accuracy - 1e-9)
    return next(reached, f"> {record['epochs']}")


SAME_TIME = 0.03  # runs differing by less count as equally long
STANDARD_ERRORS = 2  # an accuracy difference up to this may be chance


class Verdict(NamedTuple):
    """A finding; its words continue a sentence."""

    words: str
    loss: bool


def fraction(part: float, whole: float) -> str:
    """Return part / whole as "1/37.5", or as "1.20 times" if part is larger."""
    if part == whole:
        return "1/1"
    if part > whole:
        return f"{digits(part / whole)} times" if whole else "more than"
    return f"1/{digits(whole / part)}" if part else "none"


def accuracy_verdict(record: Record, other: Record) -> Verdict:
    """Compare accuracies seed by seed; a mean difference beyond two standard errors counts.

    Both methods start a seed with the same split and the same weights, so that differences within a
    seed do not depend on how hard the seed is. With one seed, any shortfall counts.
    """
    # Pair by seed: the variance between seeds, common to both methods, would hide a difference.
    mean, error = paired_difference(record, other)
    name = "dense" if other["method"] == "dense" else other["label"]
    paired = "" if error is None else f"± {points(error)}, paired over {record['seeds']} seeds"
    # Accuracies are float32 fractions of 360 images; a smaller difference is less than one image.
    if round(abs(mean), 5) == 0:
        return Verdict(
            f"equals that of {name} ({paired or percent_text(record['accuracy'])})", False
        )
    distance = f"lies {points(mean)} points {'below' if mean < 0 else 'above'} {name}"
    if error is None:
        outcome = f"{distance} (one seed: the spread is unknown)"
        return Verdict(f"{outcome}: a loss" if mean < 0 else outcome, mean < 0)
    outcome = f"{distance} ({paired})"
    if abs(mean) <= STANDARD_ERRORS * error:
        return Verdict(f"{outcome}, within two standard errors", False)
    return Verdict(
        f"{outcome}: a loss" if mean < 0 else f"{outcome}, more than two standard errors", mean < 0
    )


def points(share: float) -> str:
    """Return the size in percentage points as "0.6", or "0.04" if one decimal would show zero."""
    size = 100 * abs(share)
    return f"{size:.{1 if size >= 0.05 or size == 0 else 2}f}"


def paired_difference(record: Record, other: Record) -> tuple[float, float | None]:
    """Return the mean accuracy difference over seeds and its standard error (one seed: None)."""
    differences = [
        own - base
        for own, base in zip(record["accuracy_by_seed"], other["accuracy_by_seed"], strict=True)
    ]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, None
    return mean, statistics.stdev(differences) / math.sqrt(len(differences))


def time_outcome(record: Record, dense: Record) -> Verdict:
    """Compare the measured time of a run with dense."""
    ratio = record["seconds"] / dense["seconds"]
    if abs(ratio - 1) < SAME_TIME:
        return Verdict(f"the same within {100 * SAME_TIME:.0f} %", False)
    return Verdict("slower, a loss", True) if ratio > 1 else Verdict("faster", False)


def mean_curve(record: Record) -> list[tuple[float, float]]:
    """Return (seconds of training, loss) at the start and after each epoch, means over seeds."""
    seconds, losses = (
        [statistics.fmean(seeds) for seeds in zip(*record[of], strict=True)]
        for of in ("seconds_by_epoch", "loss_by_epoch")
    )
    return list(zip(seconds, losses, strict=True))


def seconds_to(loss: float, record: Record) -> float | None:
    """Return the seconds until the mean loss first reaches `loss`; None: never."""
    return next((seconds for seconds, mean in mean_curve(record) if mean <= loss), None)


def link_verdict(dense: Record, sparse: Record) -> Verdict:
    """Compare the seconds that both take to a loss that both reach."""
    loss = max(min(mean for _, mean in mean_curve(record)) for record in (dense, sparse))
    base, own = seconds_to(loss, dense), seconds_to(loss, sparse)
    assert base is not None
    assert own is not None
    # If the loss never fell below its start, the time is 0 and has no ratio.
    if not own or not base:
        return Verdict("No epoch has brought the loss down", True)
    times = max(base / own, own / base)
    outcome = "sooner" if own < base else "later, a loss"
    return Verdict(
        f"{sparse['label']} reaches a training loss of {loss:.2g} after "
        f"{seconds_text(own)}, dense after {seconds_text(base)}: {digits(times)} times {outcome}",
        own > base,
    )
