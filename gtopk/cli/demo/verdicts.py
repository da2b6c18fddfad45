"""Verdicts: what the records show, in words, losses as plainly as gains.

Sparse curves rise later than dense's, which the accuracy at the end does not show. So they also
say after how many epochs a method's mean accuracy first comes near to dense's end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ...units import about_bandwidth_text, bytes_text, digits, percent_text, seconds_text
from .record import LATENCY_SECONDS, Record, pays_below

BELOW = 0.01  # of dense's accuracy at the end, rounded down to a whole per cent


def level(dense: Record) -> float:
    """Return the accuracy to reach: of 0.972 at dense's end, 0.96."""
    return math.floor(100 * (dense["accuracy"] - BELOW) + 1e-9) / 100


def epochs_to(accuracy: float, record: Record) -> int | None:
    """Return after how many epochs the mean over seeds first is that; None: after none."""
    by_epoch = zip(*record["accuracy_by_epoch"], strict=True)
    means = enumerate(map(statistics.fmean, by_epoch), start=1)
    return next((epoch for epoch, mean in means if mean >= accuracy - 1e-9), None)


def epochs_text(accuracy: float, record: Record) -> str:
    """Return it as "19", or as "> 30"."""
    found = epochs_to(accuracy, record)
    return f"> {record['epochs']}" if found is None else str(found)


def heading(accuracy: float, space: str = " ") -> str:
    """Return "Epochs to 96 %"."""
    return f"Epochs{space}to {100 * accuracy:.0f} %"


SAME_TIME = 0.03  # runs whose times differ by less are called equally long
STANDARD_ERRORS = 2  # a difference in accuracy of no more than these may be chance


class Verdict(NamedTuple):
    """A finding in words that continue a sentence."""

    words: str
    loss: bool


def spread(record: Record) -> float:
    """Return the sample standard deviation of the accuracy over seeds; 0 for one seed."""
    seeds = record["accuracy_by_seed"]
    return statistics.stdev(seeds) if len(seeds) > 1 else 0.0


def method_verdict(record: Record, dense: Record, topk: Record) -> Verdict:
    """Judge a method beside dense, and gTop-k beside top-k allgather too."""
    found = against_dense(record, dense)
    if record["method"] == "topk":
        return found
    beside = against_topk(record, topk)
    return Verdict(f"{found.words} {beside.words}", found.loss or beside.loss)


def against_dense(record: Record, dense: Record) -> Verdict:
    """Judge bytes, accuracy and time of `record` beside dense."""
    sent, accuracy, time = (
        judge(record, dense) for judge in (bytes_verdict, accuracy_verdict, time_verdict)
    )
    return Verdict(
        f"Sends {sent.words}. Its test accuracy {accuracy.words}. {reaching_words(record, dense)} "
        f"Here a run took {time.words}.",
        sent.loss or accuracy.loss or time.loss,
    )


def reaching_words(record: Record, dense: Record) -> str:
    """Say after how many epochs the mean accuracy first comes near to dense's end."""
    accuracy = level(dense)
    mine, its = epochs_to(accuracy, record), epochs_to(accuracy, dense)
    beside = "" if its is None else f", dense after {its}"
    if mine is None:
        return f"It never reaches {100 * accuracy:.0f} %{beside}."
    return f"It first reaches {100 * accuracy:.0f} % after {mine} epoch{'s' * (mine > 1)}{beside}."


def against_topk(record: Record, topk: Record) -> Verdict:
    """Judge bytes and accuracy of `record` beside top-k allgather."""
    accuracy = accuracy_verdict(record, topk)
    return Verdict(
        f"Beside {topk['label']} it sends {bytes_text(record['bytes_per_step'])} a step "
        f"against {bytes_text(topk['bytes_per_step'])}, "
        f"and its test accuracy {accuracy.words}.",
        accuracy.loss,
    )


def bytes_verdict(record: Record, dense: Record) -> Verdict:
    """Judge what `record` sends beside dense."""
    sent, baseline = record["bytes_per_step"], dense["bytes_per_step"]
    if sent > baseline:
        return Verdict(f"{fraction(sent, baseline)} dense's bytes: a loss", True)
    return Verdict(f"{fraction(sent, baseline)} of dense's bytes", False)


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
    mean, error = paired_difference(record, other)
    name = "dense" if other["method"] == "dense" else other["label"]
    paired = "" if error is None else f"± {points(error)}, paired over {record['seeds']} seeds"
    if round(abs(mean), 5) == 0:  # float32 accuracies: no image more or less
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


def time_verdict(record: Record, dense: Record) -> Verdict:
    """Judge the measured time of a run beside dense."""
    outcome, loss = time_outcome(record, dense)
    ratio = digits(record["seconds"] / dense["seconds"])
    return Verdict(f"{ratio} times as long as dense: {outcome}", loss)


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
    if not mine or not its:  # the first step made it worse
        return Verdict("No epoch has brought the loss down", True)
    times, outcome = max(its / mine, mine / its), "sooner" if mine < its else "later, a loss"
    return Verdict(
        f"{sparse['label']} reaches a training loss of {loss:.2g} after {seconds_text(mine)}, "
        f"dense after {seconds_text(its)}: {digits(times)} times {outcome}",
        mine > its,
    )


def replicas_verdict(records: Sequence[Record]) -> Verdict:
    """Judge whether the ranks ended with identical models."""
    parted = [record["label"] for record in records if not record["final_replicas_identical"]]
    if parted:
        return Verdict(f"Ranks ended with different models under {', '.join(parted)}.", True)
    return Verdict("After every run all ranks held the same model, bit for bit.", False)


def model_verdict(dense: Record, sparse: Record) -> Verdict:
    """Judge, in the model, at which bandwidths `sparse` is faster than dense."""
    bandwidth = pays_below(dense, sparse)
    name, latency = sparse["label"], f"assuming a latency of {seconds_text(LATENCY_SECONDS)}"
    if bandwidth is None:
        return Verdict(
            f"in the model {name} is slower than dense at every bandwidth, {latency}", True
        )
    if math.isinf(bandwidth):
        return Verdict(
            f"in the model {name} is faster than dense at every bandwidth, {latency}", False
        )
    return Verdict(
        f"in the model {name} is faster than dense below {about_bandwidth_text(bandwidth)} "
        f"and slower above, {latency}",
        False,
    )
