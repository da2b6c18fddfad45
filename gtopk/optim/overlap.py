"""Overlap: buckets are exchanged while backward goes on, each once its gradients are complete.

The last one never is: when it is complete, backward has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..exchange.automatic import hides_behind_backward
from ..runtime.logs import EVERYWHERE
from .peers import Peers
from .step_transaction import AnyBucketExchange

_log = logging.getLogger("gtopk")


class Overlap:
    """Which buckets of a step are complete.

    is_on: as long as all of a step's gradients are known to count as backward has left them.
    """

    def __init__(self, is_on: bool, compression: object) -> None:
        self.is_on = is_on
        self._hides = hides_behind_backward(compression)
        self._bucket_exchanges: Sequence[AnyBucketExchange] = ()
        self._bucket_of: dict[int, int] = {}  # by the parameter's id
        self._members: list[frozenset[int]] = []  # ids of parameters, by bucket
        self._awaited: list[set[int]] = []

    def await_all(self, bucket_exchanges: Sequence[AnyBucketExchange]) -> None:
        """Begin a step: no gradient is complete."""
        if bucket_exchanges is not self._bucket_exchanges:
            self._bucket_exchanges = bucket_exchanges
            self._members = [frozenset(map(id, each.parameters)) for each in bucket_exchanges]
            self._bucket_of = {
                member: index for index, members in enumerate(self._members) for member in members
            }
        self._awaited = [set(members) for members in self._members]

    def completes(self, parameter: torch.nn.Parameter) -> int | None:
        """Note that a gradient is complete; return the bucket that may be exchanged now, if any."""
        if not self.is_on or (index := self._bucket_of.get(id(parameter))) is None:
            return None
        if index == len(self._awaited) - 1:
            return None  # that one ends the step: `synchronize` submits it
        awaited = self._awaited[index]
        awaited.discard(id(parameter))
        return None if awaited else index

    def stop(self, peers: Peers) -> None:
        """Exchange buckets after backward from now on, as gradients change after it, or weights."""
        if not self.is_on:
            return
        self.is_on = False
        _log.log(
            logging.WARNING if self._hides else logging.INFO,
            "rank %d: %s or their samples changed between backward() and step() (clipping by hand, "
            "say): they are exchanged after backward from now on, without overlap%s; call "
            "optimizer.synchronize() before changing them%s",
            peers.world.rank,
            peers.name,
            ", and hide_behind_backward=True hides nothing" if self._hides else "",
            ", or give density= or bytes_per_step=" if self._hides else "",
            extra=EVERYWHERE,
        )

    def warn_of_a_single_bucket(self, peers: Peers) -> None:
        """Warn where that was to hide behind backward."""
        if self._hides and self.is_on and len(self._awaited) == 1 and peers.size > 1:
            _log.warning(
                "rank %d: %s are exchanged in one bucket, when backward has ended, and "
                "hide_behind_backward=True hides nothing; make several by a smaller bucket_bytes=, "
                "or give density= or bytes_per_step=",
                peers.world.rank,
                peers.name,
                extra=EVERYWHERE,
            )
