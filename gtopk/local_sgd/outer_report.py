"""What an outer step cost: its exchange, and the steps of the round that it ends."""

from __future__ import annotations

from collectives.wire import NOTHING_CODED

from ..telemetry import StepReport
from .outer_exchange import Outcome


def report_of(
    outcome: Outcome,
    *,
    step: int,
    compute_seconds: float,
    synchronize_seconds: float,
    elements: int,
    local_steps: int,
    predicted_seconds: float | None,
    dense_seconds: float | None = None,
) -> StepReport:
    """Return the report of an outer step.

    compute_seconds: of all steps of the round. elements: values of all parameters.
    predicted_seconds: of the exchange, where it predicts nothing itself; dense_seconds: of a dense
        one.
    """
    operation, done = outcome.operation, outcome.exchanged
    coded = done.coded if done else NOTHING_CODED
    return StepReport(
        step=step,
        algorithm=done.algorithm if done else "",
        compute_seconds=compute_seconds,
        synchronize_seconds=synchronize_seconds,
        select_seconds=done.select_seconds if done else 0.0,
        apply_seconds=0.0,
        agree_seconds=operation.agree_seconds,
        communicate_seconds=operation.agree_seconds + (done.communicate_seconds if done else 0.0),
        merge_seconds=done.merge_seconds if done else 0.0,
        code_seconds=coded.seconds,
        hidden_seconds=0.0,
        working_seconds=done.seconds if done else 0.0,
        buckets=1,
        exchange_seconds=done.seconds if done else 0.0,
        predicted_seconds=(done.predicted_seconds or predicted_seconds) if done else None,
        sent_bytes=operation.traffic.sent_bytes,
        sent_messages=operation.traffic.sent_messages,
        bytes_counted=done.bytes_counted if done else True,
        coded_entries=coded.entries,
        coded_bytes=coded.bytes,
        elements=elements,
        samples=None,
        selected=done.selected if done else 0,
        updated=done.updated if done else 0,
        skipped=not outcome.moves,
        local_steps=local_steps,
        covers="outer step",
        ranks=operation.ranks,
        dense_seconds=dense_seconds if done else None,
    )
