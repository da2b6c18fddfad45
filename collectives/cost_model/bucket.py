"""Bucket: which bytes of a round pass at once, where a link has a token bucket.

    would pass at once
    burst |.                  .-----
          | '.             .'
        0 |   '-----------'
          +------------------------ seconds
            send            pause

To send empties it, and who sends on gets the link's own rate; a pause fills it again, at that rate.
"""

from __future__ import annotations

from ..cost import Link


class Bucket:
    """What a link would let pass at once now; full at first."""

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
