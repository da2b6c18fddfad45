"""Prediction: the seconds and bytes of a reduction, from its schedule, the network and the rates.

    seconds = messages * alpha + bytes * beta + entries * gamma + lists * delta

along the rounds: each takes as long as its largest message. alpha is a message's latency, beta the
seconds of a byte, gamma those of selecting, encoding, decoding and merging an entry, or of copying
one where all are sent, delta what a list takes in calls, however short. A rank sends and receives
at once (full duplex); nodes do not share a link (a switch), the ranks of a node do. Where a link
lets a burst pass, it has rested before the first round, and rests while ranks compute.

Bucket: which bytes of a round pass at once, where a link has a token bucket.

    would pass at once
    burst |.                  .-----
          | '.             .'
        0 |   '-----------'
          +------------------------ seconds
            send            pause

To send empties it, and who sends on gets the link's own rate; a pause fills it again, at that rate.

Lag: how many steps later a method that updates few coordinates is where dense would be.

Error feedback loses nothing, but its residual is applied later. Let coordinate i gain g_i a
step, and be sent when it has gathered the threshold t, every t / g_i steps:

    sum over i of g_i / t = updated        so t is the gradient's sum over `updated`
    each holds back t / 2 on average       all of them n t / 2 = n / (2 updated) gradients

So the model is as if it had taken that many steps less; half a step of these are dense's own. The
lag is one of steps, not a factor: it matters in a short training and not in a long one. Gradients
that cancel out wait for less: it is an upper bound, of which
docs/measured/convergence.md has measured shares.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from ..algorithms.gtopk_options import USUAL_GROWTH
from ..cost import Link
from ..wire import EXACT, Format
from .network import Network, Rates
from .schedules import Order, Round, list_sizes, message_bytes, most_message_bytes, schedule


def lag_steps(length: int, updated: float) -> float:
    """Return it for updates of so many coordinates out of `length`."""
    return (length / updated - 1.0) / 2.0


class Training(NamedTuple):
    """What a reduction is a part of.

    steps:             of the whole training.
    elsewhere_seconds: of each step, besides what this reduction adds to it.
    room_seconds:      of each step, in which the reduction hides; it adds what it takes beyond.
    share:             of the model's coordinates that this reduction is of; the rest has its own.
    """

    steps: float = math.inf
    elsewhere_seconds: float = 0.0
    share: float = 1.0
    room_seconds: float = 0.0

    def exposed(self, seconds: float) -> float:
        """Return by how much a reduction lengthens a step."""
        return max(0.0, seconds - self.room_seconds)

    def cost(self, seconds: float, lag_steps: float) -> float:
        """Return that, and the steps that the reduction's lag adds spread over all."""
        exposed = self.exposed(seconds)
        added = self.share * lag_steps / self.steps
        return exposed + added * (self.elsewhere_seconds + exposed)


WITHOUT_END: Final = Training()


class Bucket:
    """A link's token bucket: the bytes that pass at once, beyond the link's own rate.

    It is full at first, sending empties it, and pauses fill it again at the link's rate.
    """

    def __init__(self, burst_bytes: float) -> None:
        self._burst_bytes = self._free_bytes = burst_bytes

    def pass_on(self, times: int, message_bytes: float, link: Link, pause_seconds: float) -> float:
        """Return how many bytes of equal rounds take their time, the others passing at once.

        pause_seconds: of a round, in which nothing is sent; so is its latency.
        """
        if not self._burst_bytes or not link.burst_bytes:
            return times * message_bytes
        filled = min(
            self._burst_bytes, (link.latency_seconds + pause_seconds) / link.seconds_per_byte
        )
        free = self._free_bytes + (times - 1) * filled
        wanted = times * message_bytes
        self._free_bytes = min(self._burst_bytes, max(0.0, free - wanted) + filled)
        return max(0.0, wanted - free)


# What the algorithms call it.
WIDENING_OPTIONS: Final = {"gtopk": "growth", "oktopk": "k_out", "hierarchical": "growth"}
# What a Compression does unless one says otherwise; 1 where there is no such option.
USUAL_WIDENINGS: Final = {"gtopk": USUAL_GROWTH, "hierarchical": USUAL_GROWTH}


@dataclass(frozen=True)
class Candidate:
    """One way to reduce the gradients.

    density:  share of the elements that a rank selects; dense sends all, whatever it says.
    widening: entries of the update over those selected: gtopk's growth, also between nodes;
              oktopk's k_out / k.
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
        """Return " growth=4", say, by the algorithm's own word; nothing where it is as usual."""
        if self.widening == USUAL_WIDENINGS.get(self.algorithm, 1.0):
            return ""
        return f" {WIDENING_OPTIONS[self.algorithm]}={self.widening:g}"


class Traffic(NamedTuple):
    """What a rank sends: on average, and no rank more than `most_bytes`."""

    messages: float
    bytes: float
    most_bytes: float


@dataclass(frozen=True)
class Prediction:
    """What a candidate is expected to take.

    select_seconds:      accumulate, select, apply; of dense the copies in their place.
    code_seconds:        encode and decode.
    communicate_seconds: on the wire; latency_seconds: of these, what no bandwidth would spare.
    rounds:              of messages.
    merge_seconds:       merge, keep track of what is alive, and what lists take in calls.
    updated:             coordinates that the update holds.
    lag_steps:           steps by which its training is behind dense (see `lag_steps()`).
    agreement_seconds:   until all ranks know that all are ready, where they have to agree.
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
        """Return what follows the selection: encode, send, decode, merge."""
        return self.code_seconds + self.communicate_seconds + self.merge_seconds

    @property
    def seconds(self) -> float:
        return self.agreement_seconds + self.select_seconds + self.exchange_seconds

    def times(self, count: int) -> Prediction:
        """Return what as many take, one after the other, each of as long a vector."""
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
        """Return the prediction with its parts that many times as long."""
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
    """Return what a candidate takes for a gradient of `length` values of `value_bytes`.

    Where ranks share cores, they select and copy at the same time. What they have to code is taken
    to be shorter than the slices in which a core is divided: they stand in line.
    A hierarchy is taken to sum picks inside a node and to run gtopk across, whatever it does.
    """
    is_dense = candidate.algorithm == "dense"
    order = _order(candidate, length, network, value_bytes)
    communicate = latency = code = merge = messages = sent = 0.0
    rounds = 0
    bucket = Bucket(network.between.burst_bytes)

    for step, each in _messages(candidate, order):
        times = step.times
        held_up = network.turns(step.senders)
        coded = 0.0
        if step.lists:
            asked = rates.coding_of(candidate.format)
            rate = rates.coding_of(step.format(candidate.format)) or asked  # if it was measured
            if rate is None:
                raise KeyError(candidate.format)
            coded = step.encoded * rate.encode_seconds + step.decoded * rate.decode_seconds
        merged = step.merged * rates.merge_seconds + step.summed * rates.sum_seconds
        coded, merged = held_up * coded, held_up * merged
        # Calls were measured with all ranks at them.
        merged += step.swaps * rates.swap_seconds + step.others * rates.list_seconds
        merged += step.sends * rates.send_seconds
        code += times * coded
        merge += times * merged
        if step.fresh:
            bucket = Bucket(network.between.burst_bytes)
        link = network.link(step.leaving)
        if is_dense and network.allreduce is not None:
            link = network.allreduce
        waits = times if step.waits is None else step.waits
        latency += waits * link.latency_seconds
        rounds += times
        passed = bucket.pass_on(times, each, link, coded + merged)
        communicate += waits * link.latency_seconds + passed * link.seconds_per_byte
        messages += times * step.senders
        sent += times * step.senders * each
    most = most_bytes(candidate, length, network, value_bytes)
    wide = updated(candidate.algorithm, order)
    select = length * rates.copy_seconds
    if not is_dense:
        select = length * rates.select_seconds + candidate.selected(length) * rates.pick_seconds
    return Prediction(
        candidate,
        network.ranks_per_core * select,
        code,
        communicate,
        merge,
        latency,
        rounds,
        Traffic(messages / network.ranks, sent / network.ranks, most),
        wide,
        lag_steps(length, wide),
    )


def most_bytes(candidate: Candidate, length: int, network: Network, value_bytes: int = 4) -> float:
    """Return what no rank sends more than, wherever the picks lie (see `most_message_bytes`)."""
    return _most_bytes(candidate, _order(candidate, length, network, value_bytes))


@lru_cache(1024)
def _most_bytes(candidate: Candidate, order: Order) -> float:
    return sum(
        step.times * _bytes_of(step, candidate, order, most_message_bytes)
        for step in schedule(candidate.algorithm, order._replace(uneven=True))
    )


@lru_cache(1024)
def _messages(candidate: Candidate, order: Order) -> list[tuple[Round, float]]:
    """Return the rounds, each with the bytes of its largest message: at any speed of the links.

    The search for a break-even asks for the same ones at a hundred bandwidths.
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
    """Return the bytes of the largest message of a round, by the size of one with a list."""
    if not step.lists:
        return step.plain_bytes
    format = step.format(candidate.format)
    each = size(step.entries, order.length, format, order.value_bytes, step.parts)
    return step.plain_bytes + step.lists * each


@lru_cache(1024)
def updated(algorithm: str, order: Order) -> float:
    """Return how many coordinates an update holds, for picks that are independent by rank."""
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
    return min(picked, order.wanted)
