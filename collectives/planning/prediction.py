"""Prediction: the seconds and bytes of a reduction, from its schedule, the network and the rates.

    seconds = messages * alpha + bytes * beta + entries * gamma

along the rounds: each takes as long as its largest message. alpha is a message's latency, beta the
seconds of a byte, gamma those of selecting, encoding, decoding and merging an entry. A rank sends
and receives at once (full duplex); nodes do not share a link (a switch), the ranks of a node do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from .formats import EXACT, Format, message_bytes
from .network import Network
from .rates import Rates
from .schedules import SCHEDULES, Order


@dataclass(frozen=True)
class Candidate:
    """One way to reduce the gradients.

    density: share of the elements that a rank selects; dense sends all, whatever it says.
    """

    algorithm: str
    density: float = 1.0
    format: Format = EXACT

    def selected(self, length: int) -> int:
        """Return k for a vector of `length` elements: at least 1."""
        return max(1, round(length * self.density))

    def __str__(self) -> str:
        """Return it in words."""
        if self.algorithm == "dense":
            return "dense"
        return f"{self.algorithm} density={self.density:.3g} {'+'.join(self.format)}"


class Traffic(NamedTuple):
    """What a rank sends: on average, and no rank more than `most_bytes`."""

    messages: float
    bytes: float
    most_bytes: float


@dataclass(frozen=True)
class Prediction:
    """What a candidate is expected to take.

    select_seconds:      accumulate, select, apply.
    code_seconds:        encode and decode.
    communicate_seconds: on the wire.
    merge_seconds:       merge, and keep track of what is alive.
    updated:             coordinates that the update holds.
    """

    candidate: Candidate
    select_seconds: float
    code_seconds: float
    communicate_seconds: float
    merge_seconds: float
    sent: Traffic
    updated: float

    @property
    def exchange_seconds(self) -> float:
        """Return what follows the selection: encode, send, decode, merge."""
        return self.code_seconds + self.communicate_seconds + self.merge_seconds

    @property
    def seconds(self) -> float:
        """Return what all of it takes."""
        return self.select_seconds + self.exchange_seconds

    def scaled(self, select: float, exchange: float) -> Prediction:
        """Return the prediction with its parts that many times as long."""
        return replace(
            self,
            select_seconds=select * self.select_seconds,
            code_seconds=exchange * self.code_seconds,
            communicate_seconds=exchange * self.communicate_seconds,
            merge_seconds=exchange * self.merge_seconds,
        )


def predict(
    candidate: Candidate, length: int, network: Network, rates: Rates, value_bytes: int = 4
) -> Prediction:
    """Return what a candidate takes for a gradient of `length` values of `value_bytes`."""
    is_dense = candidate.algorithm == "dense"
    k = length if is_dense else candidate.selected(length)
    order = Order(length, k, network.ranks, network.ranks_per_node, value_bytes, network.ring)
    communicate = code = merge = messages = sent = most = 0.0
    for step in SCHEDULES[candidate.algorithm](order):
        each = step.plain_bytes
        if step.lists:
            each += step.lists * message_bytes(step.entries, length, candidate.format, value_bytes)
            rate = rates.coding[candidate.format]
            code += step.encoded * rate.encode_seconds + step.decoded * rate.decode_seconds
        link = network.link(step.leaving)
        if is_dense and network.allreduce is not None:
            link = network.allreduce
        communicate += link.latency_seconds + each * link.seconds_per_byte
        merge += step.merged * rates.merge_seconds
        messages += step.senders
        sent += step.senders * each
        most += each
    return Prediction(
        candidate,
        0.0 if is_dense else length * rates.select_seconds,
        code,
        communicate,
        merge,
        Traffic(messages / network.ranks, sent / network.ranks, most),
        updated(candidate, length, network.ranks),
    )


def updated(candidate: Candidate, length: int, ranks: int) -> float:
    """Return how many coordinates an update holds, for picks that are independent by rank."""
    if candidate.algorithm == "dense":
        return float(length)
    if candidate.algorithm == "topk-allgather":
        return float(length * (1.0 - (1.0 - candidate.selected(length) / length) ** ranks))
    return float(candidate.selected(length))
