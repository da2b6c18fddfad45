"""Overlap: whether buckets are exchanged while backward goes on, as their gradients get complete.

The last bucket never is: when it is complete, backward has ended.
"""

from __future__ import annotations

import logging

from ..exchange.automatic import hides_behind_backward
from ..runtime.logs import EVERYWHERE
from .peers import Peers

_log = logging.getLogger("gtopk")


class Overlap:
    """Whether buckets are exchanged before backward has ended.

    is_on: until gradients, or weights, are changed between backward and the step.
    """

    def __init__(self, is_on: bool, compression: object) -> None:
        self.is_on = is_on
        self._hides = hides_behind_backward(compression)

    def stop(self, peers: Peers) -> None:
        """Exchange buckets after backward from now on: gradients or weights change after it."""
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

    def warn_of_a_single_bucket(self, buckets: int, peers: Peers) -> None:
        """Warn where hide_behind_backward is asked for, and a single bucket cannot hide."""
        if self._hides and self.is_on and buckets == 1 and peers.size > 1:
            _log.warning(
                "rank %d: %s are exchanged in one bucket, when backward has ended, and "
                "hide_behind_backward=True hides nothing; make several by a smaller bucket_bytes=, "
                "or give density= or bytes_per_step=",
                peers.world.rank,
                peers.name,
                extra=EVERYWHERE,
            )
