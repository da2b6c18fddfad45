"""Verdicts: the records' findings as text, losses as plainly as gains.

Record: the demo's measurements of one method, an entry of report/results.json.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

from ...units import digits, percent_text, seconds_text

METHODS = ("dense", "topk", "gtopk", "gtopk-equal-bytes")  # the order of results.json
OVER_LINK = ("dense", "gtopk")  # which stand behind them, where a link was emulated, too

# Of a step. compute: since the last exchange ended. select: gradients in and out of the bucket, the
# check that they are finite, accumulate, select, apply. communicate: agree, encode, exchange, merge
# and decode; waiting for others included.
PARTS = ("compute", "select", "communicate")


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
    step_seconds: dict[str, float]  # by PARTS: median over steps, mean over ranks
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
    machine: dict[str, Any]  # of gtopk.runtime.machine, and the versions of torch and MPI


def over_link(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records of dense and gTop-k over the emulated link; none where there was none."""
    return records[len(METHODS) :]


BELOW = 0.01  # of dense's accuracy at the end, rounded down to a whole per cent


def level(dense: Record) -> float:
    """Return the accuracy to reach: of 0.972 at dense's end, 0.96."""
    # 1e-9: in floats 100 * (0.57 - 0.01) is just below 56.
    return math.floor(100 * (dense["accuracy"] - BELOW) + 1e-9) / 100


def epochs_text(accuracy: float, record: Record) -> str:
    """Return after how many epochs the mean over seeds first is that: "19", or "> 30"."""
    by_epoch = zip(*record["accuracy_by_epoch"], strict=True)
    means = enumerate(map(statistics.fmean, by_epoch), start=1)
    reached = (str(epoch) for epoch, mean in means if mean >= accuracy - 1e-9)
    return next(reached, f"> {record['epochs']}")


SAME_TIME = 0.03  # runs whose times differ by less are called equally long
STANDARD_ERRORS = 2  # a difference in accuracy of no more than these may be chance


class Verdict(NamedTuple):
    """A finding in words that continue a sentence."""

    words: str
    loss: bool


def fraction(part: float, whole: float) -> str:
    """Return a part of a whole as "1/37.5", or as "1.20 times" where it is the larger."""
    if part == whole:
        return "1/1"
    if part > whole:
        return f"{digits(part / whole)} times" if whole else "more than"
    return f"1/{digits(whole / part)}" if part else "none"


def accuracy_verdict(record: Record, other: Record) -> Verdict:
    """Judge the accuracy by its differences seed by seed: more than two standard errors count.

    Both methods start a seed with the same split and the same weights, so the difference within a
    seed is free of what makes one seed easier than another. One seed alone: any shortfall counts.
    """
    # Paired by seed: the variance between seeds, the same for both methods, would hide a
    # difference.
    mean, error = paired_difference(record, other)
    name = "dense" if other["method"] == "dense" else other["label"]
    paired = "" if error is None else f"± {points(error)}, paired over {record['seeds']} seeds"
    # Accuracies are float32 shares of 360 images: a smaller difference is not one image.
    if round(abs(mean), 5) == 0:
        return Verdict(
            f"equals that of {name} ({paired or percent_text(record['accuracy'])})", False
        )
    distance = f"lies {points(mean)} points {'below' if mean < 0 else 'above'} {name}"
    if error is None:
        outcome = f"{distance} (one seed: no spread to judge that by)"
        return Verdict(f"{outcome}: a loss" if mean < 0 else outcome, mean < 0)
    outcome = f"{distance} ({paired})"
    if abs(mean) <= STANDARD_ERRORS * error:
        return Verdict(f"{outcome}, within two standard errors", False)
    return Verdict(
        f"{outcome}: a loss" if mean < 0 else f"{outcome}, more than two standard errors", mean < 0
    )


def points(share: float) -> str:
    """Return a size in percentage points as "0.6", or as "0.04" where one decimal shows nothing."""
    size = 100 * abs(share)
    return f"{size:.{1 if size >= 0.05 or size == 0 else 2}f}"


def paired_difference(record: Record, other: Record) -> tuple[float, float | None]:
    """Return mean and standard error of the accuracy's differences by seed; None for one seed."""
    differences = [
        mine - theirs
        for mine, theirs in zip(record["accuracy_by_seed"], other["accuracy_by_seed"], strict=True)
    ]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, None
    return mean, statistics.stdev(differences) / math.sqrt(len(differences))


def time_outcome(record: Record, dense: Record) -> Verdict:
    """Name what the measured time of a run beside dense comes to."""
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
    """Return the seconds until the mean loss first is that; None: it never is."""
    return next((seconds for seconds, mean in mean_curve(record) if mean <= loss), None)


def link_verdict(dense: Record, sparse: Record) -> Verdict:
    """Judge the time that both take to the loss that both reach."""
    loss = max(min(mean for _, mean in mean_curve(record)) for record in (dense, sparse))
    its, mine = seconds_to(loss, dense), seconds_to(loss, sparse)
    assert its is not None
    assert mine is not None
    # The first epoch made the loss worse: the start is the best, and times have no ratio.
    if not mine or not its:
        return Verdict("No epoch has brought the loss down", True)
    times, outcome = max(its / mine, mine / its), "sooner" if mine < its else "later, a loss"
    return Verdict(
        f"{sparse['label']} reaches a training loss of {loss:.2g} after {seconds_text(mine)}, "
        f"dense after {seconds_text(its)}: {digits(times)} times {outcome}",
        mine > its,
    )
