"""What a step cost: times, bytes and entries, as this rank measured them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """One optimizer step of this rank.

    algorithm:           what reduced the gradients; "" where nothing did.
    compute_seconds:     since the last exchange ended: forward, backward, the optimizer's own step.
    select_seconds:      gradients in and out of the bucket, accumulate, select, apply.
    communicate_seconds: agree, encode, exchange, merge and decode; waiting for others included.
    merge_seconds:       of communicate_seconds: encode, merge and decode here; neither waiting nor
                         the wire. 0 for dense, whose adding is inside its allreduce.
    exchange_seconds:    accumulate, select, encode to decode, apply: what the cost model predicts.
    predicted_seconds:   what it predicted for that; None where nothing was predicted.
    sent_bytes:          by this rank, with headers.
    sent_messages:       by this rank.
    bytes_counted:       whether all of these were counted, or a dense allreduce's by formula.
    selected:            entries this rank picked (dense: all).
    updated:             coordinates that the agreed update holds.
    skipped:             a rank's gradient was not finite: nothing was applied anywhere.
    """

    step: int
    algorithm: str
    compute_seconds: float
    select_seconds: float
    communicate_seconds: float
    merge_seconds: float
    exchange_seconds: float
    predicted_seconds: float | None
    sent_bytes: int
    sent_messages: int
    bytes_counted: bool
    selected: int
    updated: int
    skipped: bool
