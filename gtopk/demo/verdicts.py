"""Say in words what the records show, losses as plainly as gains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from .model import LATENCY_SECONDS, break_even
from .record import Record
from .units import bandwidth_text, bytes_text, digits, percent_text, seconds_text

SAME_TIME = 0.03  # runs whose times differ by less are called equally long


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
        f"Sends {sent.words}. Its test accuracy {accuracy.words}. Here a run took {time.words}.",
        sent.loss or accuracy.loss or time.loss,
    )


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
    """Judge the accuracy by the larger of the two spreads over seeds."""
    points = 100 * (record["accuracy"] - other["accuracy"])
    noise = 100 * max(spread(record), spread(other))
    name = "dense" if other["method"] == "dense" else other["label"]
    if abs(points) < 0.05:
        return Verdict(f"equals that of {name} ({percent_text(record['accuracy'])})", False)
    distance = f"lies {abs(points):.1f} points {'below' if points < 0 else 'above'} {name}"
    if record["seeds"] < 2:
        return Verdict(f"{distance} (one seed: no spread to judge that by)", points < 0)
    if abs(points) <= noise:
        return Verdict(f"{distance}, within the spread over seeds ({noise:.1f} points)", False)
    outcome = f"{distance}, more than the spread over seeds ({noise:.1f} points)"
    return Verdict(f"{outcome}: a loss" if points < 0 else outcome, points < 0)


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


def replicas_verdict(records: Sequence[Record]) -> Verdict:
    """Judge whether the ranks ended with identical models."""
    parted = [record["label"] for record in records if not record["final_replicas_identical"]]
    if parted:
        return Verdict(f"Ranks ended with different models under {', '.join(parted)}.", True)
    return Verdict("After every run all ranks held the same model, bit for bit.", False)


def model_verdict(dense: Record, sparse: Record) -> Verdict:
    """Judge, in the model, at which bandwidths `sparse` is faster than dense."""
    bandwidth = break_even(dense, sparse)
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
        f"in the model {name} is faster than dense below {bandwidth_text(bandwidth)} "
        f"and slower above, {latency}",
        False,
    )
