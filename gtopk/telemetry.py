"""What a step cost: times, bytes and entries, as this rank measured them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rounds import Round


@dataclass(frozen=True)
class StepReport:
    """One optimizer step of this rank.

    algorithm:           what reduced the gradients; "" where nothing did.
    compute_seconds:     since the last exchange ended: forward, backward, the optimizer's own step.
    select_seconds:      gradients in and out of the bucket, accumulate, select, apply.
    communicate_seconds: agree, encode, exchange, merge and decode; waiting for others included.
    merge_seconds:       of communicate_seconds: encode, merge and decode here; neither waiting nor
                         the wire. 0 for dense, whose adding is inside its allreduce.
    hidden_seconds:      of what the engine's thread did for the step: accumulate, select and
                         communicate while backward was still at work, or the program elsewhere.
    working_seconds:     all that the engine's thread did for it; 1 - hidden/working was waited for.
    buckets:             how many there were.
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
    hidden_seconds: float
    working_seconds: float
    buckets: int
    exchange_seconds: float
    predicted_seconds: float | None
    sent_bytes: int
    sent_messages: int
    bytes_counted: bool
    selected: int
    updated: int
    skipped: bool


def report(
    round: Round,
    *,
    step: int,
    compute_seconds: float,
    synchronize_began: float,
    apply_seconds: float,
    skipped: bool,
) -> StepReport:
    """Return what a round, which is over, was for its step."""
    operations, exchanged = round.operations.values(), list(round.exchanged.values())
    select_seconds = sum(each.select_seconds for each in exchanged)
    exchange_seconds = sum(each.seconds for each in exchanged) + apply_seconds
    predictions = [each.predicted_seconds for each in exchanged]
    return StepReport(
        step=step,
        algorithm="+".join(sorted({each.algorithm for each in exchanged})),
        compute_seconds=compute_seconds,
        select_seconds=select_seconds + apply_seconds,
        communicate_seconds=sum(each.communicate_seconds for each in exchanged)
        + sum(operation.agree_seconds for operation in operations),
        merge_seconds=sum(each.merge_seconds for each in exchanged),
        hidden_seconds=sum(
            max(0.0, min(ended, synchronize_began) - begun) for begun, ended in round.spans
        ),
        working_seconds=sum(ended - begun for begun, ended in round.spans),
        buckets=len(round.lanes),
        exchange_seconds=exchange_seconds if exchanged else 0.0,
        predicted_seconds=None
        if not predictions or None in predictions
        else sum(filter(None, predictions)),
        sent_bytes=sum(operation.traffic.sent_bytes for operation in operations),
        sent_messages=sum(operation.traffic.sent_messages for operation in operations),
        bytes_counted=all(each.bytes_counted for each in exchanged),
        selected=sum(each.selected for each in exchanged),
        updated=sum(each.updated for each in exchanged),
        skipped=skipped,
    )
