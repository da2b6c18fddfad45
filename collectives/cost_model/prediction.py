"""Prediction: the seconds and bytes of a reduction, from its schedule, the network and the rates.

    seconds = messages * alpha + bytes * beta + entries * gamma + lists * delta

summed over rounds, each of which takes as long as its largest message. alpha is a message's
latency, beta the time of a byte, gamma that of selecting, encoding, decoding and merging an entry
(or of copying one, for dense), delta the per-call overhead of a list. A rank sends and receives at
the same time (full duplex). Each node has its own link (to a switch), which its ranks share.

A link with a token bucket (`Bucket`) lets some bytes pass at once. Sending empties the bucket, and
further bytes pass at the link's own rate. A pause refills it at that rate, also one in which ranks
compute; before the first round it is full.

    bytes in the bucket
    burst |.                  .-----
          | '.             .'
        0 |   '-----------'
          +------------------------ seconds
            send            pause

The convergence delay ("lag") is the number of steps by which a method that updates few coordinates
is behind dense. Error feedback loses nothing, but applies its residual later. Let coordinate i gain
g_i a step, and be sent when it has reached the threshold t, so every t / g_i steps:

    sum over i of g_i / t = updated        so t is the sum of g_i / `updated`
    the mean residual is t / 2             in all n t / 2 = n / (2 updated) gradients

It is as if the model had taken that many steps less; half a step of this is dense's own. The lag is
a number of steps, not a factor: it matters in a short training and not in a long one. It is an
upper bound, as gradients that cancel out cost no steps; docs/measured/convergence.md shows the
measured part of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from ..algorithms.gtopk import USUAL_GROWTH
from ..cost import Link
from ..wire import EXACT, Format
from .network import Network, Rates
from .schedules import Order, Round, list_sizes, message_bytes, most_message_bytes, schedule


def lag_steps(length: int, updated: float) -> float:
    """Return the lag of updates of `updated` coordinates out of `length`."""
    return (length / updated - 1.0) / 2.0


class Training(NamedTuple):
    """The training that a reduction is a part of.

    steps:             the steps of the whole training.
    elsewhere_seconds: of each step, without this reduction.
    room_seconds:      of each step in which the reduction is hidden; only the rest of it counts.
    share:             share of the model's coordinates that this reduction has.
    """

    steps: float = math.inf
    elsewhere_seconds: float = 0.0
    share: float = 1.0
    room_seconds: float = 0.0

    def exposed(self, seconds: float) -> float:
        """Return by how much a reduction lengthens a step."""
        return max(0.0, seconds - self.room_seconds)

    def cost(self, seconds: float, lag_steps: float) -> float:
        """Return the exposed seconds of a step, and its share of the steps that the lag adds."""
        exposed = self.exposed(seconds)
        added = self.share * lag_steps / self.steps
        return exposed + added * (self.elsewhere_seconds + exposed)


WITHOUT_END: Final = Training()


class Bucket:
    """A node's token bucket: bytes that pass at once, without taking time; full at first."""

    def __init__(self, burst_bytes: float) -> None:
        self._burst_bytes = self._free_bytes = burst_bytes

    def pass_on(
        self, times: int, message_bytes: float, link: Link, pause_seconds: float, sharing: int
    ) -> float:
        """Send equal rounds; return how many of a rank's bytes take time, at the link's rate.

        link: the rank's share of it. sharing: how many ranks of the node send at the same time.
        pause_seconds: of each round, without its latency, in which nothing is sent either.
        """
        if not self._burst_bytes or not link.burst_bytes:
            return times * message_bytes
        pause_seconds += link.latency_seconds
        filled = min(self._burst_bytes, sharing * pause_seconds / link.seconds_per_byte)
        # Refilled after each round. The last round's pause refills it for what follows.
        free = self._free_bytes + (times - 1) * filled
        needed = sharing * times * message_bytes
        self._free_bytes = min(self._burst_bytes, max(0.0, free - needed) + filled)
        return max(0.0, needed - free) / sharing


# The algorithms' names for the option that widens an update.
WIDENING_OPTIONS: Final = {"gtopk": "growth", "oktopk": "k_out", "hierarchical": "growth"}
# The defaults of a Compression; 1 for the other algorithms.
USUAL_WIDENINGS: Final = {"gtopk": USUAL_GROWTH, "hierarchical": USUAL_GROWTH}


@dataclass(frozen=True)
class Candidate:
    """One way to reduce the gradients.

    density:  share of the elements that a rank selects; ignored by dense, which sends all.
    widening: entries of the update / those selected: gtopk's growth, also between nodes; oktopk's
              k_out / k.
    """

    algorithm: str
    density: float = 1.0
    format: Format = EXACT
    widening: float = 1.0

    def selected(self, length: int) -> int:
        """Return k for a vector of `length` elements: at least 1."""
        return max(1, round(length * self.density))

    def __str__(self) -> str:
        if self.algorithm == "dense":
            return "dense"
        return f"{self.algorithm} density={self.density:.3g}{self.wider} {'+'.join(self.format)}"

    @property
    def wider(self) -> str:
        """Return the widening as the algorithm's option, " growth=4"; "" for its default."""
        if self.widening == USUAL_WIDENINGS.get(self.algorithm, 1.0):
            return ""
        return f" {WIDENING_OPTIONS[self.algorithm]}={self.widening:g}"


class Traffic(NamedTuple):
    """Messages and bytes that a rank sends, on average; none sends more than `most_bytes`."""

    messages: float
    bytes: float
    most_bytes: float


@dataclass(frozen=True)
class Prediction:
    """The predicted time and traffic of a candidate.

    select_seconds:      accumulate, select, apply; for dense, the copies instead.
    code_seconds:        encode and decode.
    communicate_seconds: on the wire; latency_seconds: the part that does not depend on bandwidth.
    rounds:              rounds of messages.
    merge_seconds:       merges, tracking of alive picks, and the per-call overhead of lists.
    updated:             coordinates in the update.
    lag_steps:           steps by which its training is behind dense (see `lag_steps()`).
    agreement_seconds:   until all ranks know that all are ready, if they have to agree.
    """

    candidate: Candidate
    select_seconds: float
    code_seconds: float
    communicate_seconds: float
    merge_seconds: float
    latency_seconds: float
    rounds: int
    sent: Traffic
    updated: float
    lag_steps: float
    agreement_seconds: float = 0.0

    @property
    def exchange_seconds(self) -> float:
        """Return the seconds after the selection: encode, send, decode, merge."""
        return self.code_seconds + self.communicate_seconds + self.merge_seconds

    @property
    def seconds(self) -> float:
        return self.agreement_seconds + self.select_seconds + self.exchange_seconds

    def times(self, count: int) -> Prediction:
        """Return the prediction for `count` such reductions, one after the other."""
        if count == 1:
            return self
        sent = Traffic(*(count * each for each in self.sent))
        return replace(
            self.scaled(count, count, count),
            rounds=count * self.rounds,
            sent=sent,
            updated=count * self.updated,
        )

    def scaled(self, select: float, merge: float, communicate: float) -> Prediction:
        """Return the prediction with its parts multiplied by these factors."""
        return replace(
            self,
            select_seconds=select * self.select_seconds,
            code_seconds=merge * self.code_seconds,
            communicate_seconds=communicate * self.communicate_seconds,
            merge_seconds=merge * self.merge_seconds,
            latency_seconds=communicate * self.latency_seconds,
        )


def predict(
    candidate: Candidate,
    length: int,
    network: Network,
    rates: Rates,
    value_bytes: int = 4,
) -> Prediction:
    """Return the prediction for a gradient of `length` values of `value_bytes`.

    Ranks that share a core are assumed to select and copy at the same time, but to encode and
    decode one after the other, as coding takes less than a time slice of the scheduler.
    A hierarchy is assumed to sum picks inside a node and to run gtopk across.
    """
    is_dense = candidate.algorithm == "dense"
    order = _order(candidate, length, network, value_bytes)
    communicate = latency = code = merge = messages = sent = 0.0
    rounds = 0
    bucket = Bucket(network.between.burst_bytes)

    for step, largest_bytes in _messages(candidate, order):
        times = step.times
        waves = network.coding_waves(step.senders)
        coded = 0.0
        if step.lists:
            requested = rates.coding_of(candidate.format)
            rate = rates.coding_of(step.format(candidate.format)) or requested  # if it was measured
            if rate is None:
                raise KeyError(candidate.format)
            coded = step.encoded * rate.encode_seconds + step.decoded * rate.decode_seconds
        merged = step.merged * rates.merge_seconds + step.summed * rates.sum_seconds
        coded, merged = waves * coded, waves * merged
        # Not times `waves`: per-call overheads were measured with all ranks active.
        merged += step.swaps * rates.swap_seconds + step.others * rates.list_seconds
        merged += step.sends * rates.send_seconds
        code += times * coded
        merge += times * merged
        # Ranks that have not sent yet still have a full bucket.
        if step.fresh:
            bucket = Bucket(network.between.burst_bytes)
        link = network.link(step.leaving)
        if is_dense and network.allreduce is not None:
            link = network.allreduce
        # Messages that are sent at once share one latency.
        waits = times if step.waits is None else step.waits
        latency += waits * link.latency_seconds
        rounds += times
        passed = bucket.pass_on(times, largest_bytes, link, coded + merged, max(1, step.leaving))
        communicate += waits * link.latency_seconds + passed * link.seconds_per_byte
        messages += times * step.senders
        sent += times * step.senders * largest_bytes
    most = most_bytes(candidate, length, network, value_bytes)
    update_entries = updated(candidate.algorithm, order)
    select = length * rates.copy_seconds
    if not is_dense:
        select = length * rates.select_seconds + candidate.selected(length) * rates.pick_seconds
    return Prediction(
        candidate,
        select_seconds=network.ranks_per_core * select,
        code_seconds=code,
        communicate_seconds=communicate,
        merge_seconds=merge,
        latency_seconds=latency,
        rounds=rounds,
        sent=Traffic(messages / network.ranks, sent / network.ranks, most),
        updated=update_entries,
        lag_steps=lag_steps(length, update_entries),
    )


def most_bytes(candidate: Candidate, length: int, network: Network, value_bytes: int = 4) -> float:
    """Return the most bytes that any rank sends, for any picks (see `most_message_bytes`)."""
    return _most_bytes(candidate, _order(candidate, length, network, value_bytes))


@lru_cache(1024)
def _most_bytes(candidate: Candidate, order: Order) -> float:
    return sum(
        step.times * _bytes_of(step, candidate, order, most_message_bytes)
        for step in schedule(candidate.algorithm, order._replace(uneven=True))
    )


@lru_cache(1024)
def _messages(candidate: Candidate, order: Order) -> list[tuple[Round, float]]:
    """Return the rounds, each with the bytes of its largest message.

    Cached: a search for a break-even tries a hundred bandwidths, on which they do not depend.
    """
    return [
        (step, _bytes_of(step, candidate, order, message_bytes))
        for step in schedule(candidate.algorithm, order)
    ]


def _order(candidate: Candidate, length: int, network: Network, value_bytes: int) -> Order:
    k = length if candidate.algorithm == "dense" else candidate.selected(length)
    native_bytes = sys.maxsize if network.native_bytes is None else network.native_bytes
    return Order(
        length,
        k,
        network.ranks,
        network.ranks_per_node,
        value_bytes,
        candidate.widening,
        native_bytes=native_bytes,
    )


def _bytes_of(
    step: Round,
    candidate: Candidate,
    order: Order,
    size: Callable[[int, int, Format, int, int], float],
) -> float:
    """Return the bytes of the largest message of a round; size: returns those of one list."""
    if not step.lists:
        return step.plain_bytes
    format = step.format(candidate.format)
    each = size(step.entries, order.length, format, order.value_bytes, step.parts)
    return step.plain_bytes + step.lists * each


@lru_cache(1024)
def updated(algorithm: str, order: Order) -> float:
    """Return how many coordinates an update has, if ranks' picks are independent."""
    if algorithm == "dense":
        return float(order.length)
    picked = order.length * (1.0 - (1.0 - order.k / order.length) ** order.ranks)
    match algorithm:
        case "topk-allgather":
            return picked
        case "shards":
            return float(order.k)
        case "gtopk":
            return min(picked, list_sizes(order)[-1])
        case "hierarchical":
            return min(picked, list_sizes(order._replace(ranks=order.nodes))[-1])
    return min(picked, order.k_out)
