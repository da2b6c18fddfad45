"""StepReport: a step's times, bytes and entries, as this rank measured them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..units import duration_text, seconds_text

if TYPE_CHECKING:
    from ..exchange.exchange import Exchanged
    from ..runtime.coordinator import Operation


@dataclass(frozen=True)
class StepReport:
    """One optimizer step of this rank, or several steps reported as one: see `covers`.

    step:                its number, counted from 0; that of the last step if it covers several.
    algorithm:           the algorithm that reduced the gradients; "" if none did.
    compute_seconds:     since the last exchange ended: forward, backward, the optimizer's own step.
    synchronize_seconds: all time spent waiting; with compute_seconds, the whole step.
    select_seconds:      gradients in and out of the bucket, accumulate, select, apply.
    apply_seconds:       of select_seconds: apply the update, after everything else.
    communicate_seconds: agree, encode, exchange, merge and decode; includes waiting for others.
    agree_seconds:       of communicate_seconds: until all ranks were known to be ready.
    merge_seconds:       of communicate_seconds: encode, merge and decode on this rank, without
                         waiting or sending. 0 for dense, which adds inside its allreduce.
    code_seconds:        of merge_seconds: encode and decode.
    hidden_seconds:      of working_seconds: the part during which the program did not wait, such as
                         in backward.
    working_seconds:     the engine thread's time for the step: accumulate, select and communicate.
                         The program waited for a share of 1 - hidden/working.
    buckets:             number of buckets.
    exchange_seconds:    accumulate, select, encode to decode, apply. The cost model predicts this.
    predicted_seconds:   the cost model's prediction of exchange_seconds; None if it made none.
    dense_seconds:       its prediction for a dense allreduce of the same gradients; None if nothing
                         is compressed, or nothing was predicted.
    sent_bytes:          by this rank, with headers.
    sent_messages:       by this rank.
    bytes_counted:       True if all bytes and messages were counted; False if those of a dense
                         allreduce were computed with a formula.
    coded_entries, coded_bytes: of this rank's own sparse messages, with headers.
    elements:            number of values in all gradients that were exchanged.
    model_elements:      number of values in the model, if parts of it are exchanged in turn, such
                         as LocalSGD's fragments; 0 if all are exchanged at once.
    ranks:               number of ranks that exchanged; 0 for none, or in older records.
    samples:             number of samples in this rank's gradients; None if unknown.
    selected:            number of entries that this rank picked (all for dense).
    updated:             number of coordinates in the agreed update.
    skipped:             a gradient, or a sum, was not finite, so no rank applied the update. In a
                         "period": some of this rank's own updates were not finite and left out.
    local_steps:         number of this rank's optimizer steps covered; 0 if all were skipped.
    covers:              "step", or in some modes several steps:
                         "round" (mode "abs"): its micro-batches and their reduction, which runs
                         while the next round computes.
                         "outer step" (LocalSGD): with the steps before it.
                         "mega-batch" (mode "adaptive-sgd"): this rank's batches in it, and the
                         merge that ends it.
                         "period" (the hogbatch modes): this worker's batches in a quarter of a
                         second, at least one; or the rest of an epoch.
    gradient_norm:       of the mean gradient before clipping, if Adam's step is computed from it
                         before the selection. Estimated from one in 240 coordinates, so it is
                         noisy, most for small models. None otherwise, for a skipped step, and where
                         the sample is empty or all zeros.
    """

    step: int
    algorithm: str
    compute_seconds: float
    synchronize_seconds: float
    select_seconds: float
    apply_seconds: float
    communicate_seconds: float
    agree_seconds: float
    merge_seconds: float
    code_seconds: float
    hidden_seconds: float
    working_seconds: float
    buckets: int
    exchange_seconds: float
    predicted_seconds: float | None
    sent_bytes: int
    sent_messages: int
    bytes_counted: bool
    coded_entries: int
    coded_bytes: int
    elements: int
    samples: int | None
    selected: int
    updated: int
    skipped: bool
    # Fields with defaults are missing in records of earlier versions.
    local_steps: int = 1
    covers: str = "step"
    ranks: int = 0
    dense_seconds: float | None = None
    model_elements: int = 0
    gradient_norm: float | None = None

    def __repr__(self) -> str:
        """Return the fields with three digits, to be read; the record keeps all digits."""
        shown = (
            f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value!r}"
            for name, value in vars(self).items()
        )
        return f"StepReport({', '.join(shown)})"


PARTS: Final = ("compute", "wait", "select", "pack", "exchange", "merge")


def parts(step: StepReport) -> dict[str, float]:
    """Return the seconds of a step for each of PARTS, which add up to its wall-clock time.

    The engine's work counts only as far as backward did not hide it. The rest of the time that the
    program waited for the update is "wait": for other ranks, and for the engine's turn.
    """
    exposed = _exposed(step)
    busy = {
        "select": step.select_seconds - step.apply_seconds,
        "pack": step.code_seconds,
        "exchange": step.communicate_seconds - step.agree_seconds - step.merge_seconds,
        "merge": step.merge_seconds - step.code_seconds,
    }
    waited = max(0.0, step.synchronize_seconds)
    applied = min(waited, max(0.0, step.apply_seconds))
    available = waited - applied
    seconds = {part: max(0.0, exposed * each) for part, each in busy.items()}
    # The threads measure independently: the engine's parts may exceed the program's wait.
    total = sum(seconds.values())
    factor = min(1.0, available / total) if total else 1.0
    seconds = {part: factor * each for part, each in seconds.items()}
    wait = available - sum(seconds.values())
    seconds["select"] += applied
    return {"compute": max(0.0, step.compute_seconds), "wait": max(0.0, wait), **seconds}


def _exposed(step: StepReport) -> float:
    """Return the share of the engine's work that the program waited for."""
    hidden = step.hidden_seconds / step.working_seconds if step.working_seconds else 0.0
    return max(0.0, 1.0 - hidden)


def density(step: StepReport) -> float | None:
    """Return the share of the values that this rank selected; None if none were exchanged."""
    return step.selected / step.elements if step.elements else None


def batch(step: StepReport) -> float | None:
    """Return the samples per step of this rank's optimizer; None if unknown, or without a step."""
    if step.samples is None or not step.local_steps:
        return None
    return step.samples / step.local_steps


@dataclass
class Balance:
    """The cost of compression in a run so far, compared with dense gradients."""

    seconds: float = 0.0
    exchange_seconds: float = 0.0
    exposed_seconds: float = 0.0  # of the compressed exchanges, the time that the program waited
    expected_steps: int = 0  # steps with a predicted exchange
    expected_seconds: float = 0.0
    compared_seconds: float = 0.0  # of the exchanges with a prediction
    compared_dense_seconds: float = 0.0
    dense_seconds: float = 0.0
    selected: int = 0
    elements: int = 0
    coded_entries: int = 0
    coded_bytes: int = 0
    algorithm: str = ""  # of the last compressed step
    compresses: bool = False  # whether any step was compressed, with a prediction or without

    def note(self, step: StepReport, count: int = 1) -> None:
        """Count a step `count` times if it has a prediction for dense."""
        is_dense = step.algorithm == "dense"
        self.compresses |= step.algorithm not in ("", "dense")
        if step.dense_seconds is None or step.skipped:
            return
        # If Compression.auto ran dense, use the measured time: nothing was saved or lost.
        dense_seconds = step.exchange_seconds if is_dense else step.dense_seconds
        self.seconds += count * (step.compute_seconds + step.synchronize_seconds)
        self.exchange_seconds += count * step.exchange_seconds
        if not is_dense:
            self.exposed_seconds += count * _exposed(step) * step.exchange_seconds
        self.dense_seconds += count * dense_seconds
        # predicted_seconds is None while the density warms up.
        if step.predicted_seconds is not None:
            self.expected_steps += count
            self.expected_seconds += count * step.predicted_seconds
            self.compared_seconds += count * step.exchange_seconds
            self.compared_dense_seconds += count * dense_seconds
        self.selected += step.selected
        self.elements += step.elements
        self.coded_entries += step.coded_entries
        self.coded_bytes += step.coded_bytes
        self.algorithm = self.algorithm if is_dense else step.algorithm

    def verdict(self, link: str = "") -> str:
        """Return a sentence on whether compression paid; "" if unknown, or if none ran.

        link: the run's emulated link, as text; "" for the real links.
        For dense, the model predicts the exchange, but not how much of it backward would hide.
        """
        if not self.elements or not self.compresses:
            return ""
        # A loss cannot exceed the exposed time: a hidden exchange costs nothing.
        saved = max(self.dense_seconds - self.exchange_seconds, -self.exposed_seconds)
        run = f"{duration_text(self.seconds + max(0.0, saved))} against dense (by estimate)"
        if abs(saved) < _NEGLIGIBLE * self.seconds:
            result = (
                f"compression neither saved nor cost time in {duration_text(self.seconds)} (dense "
                "by estimate)"
            )
        elif self._contradicts_prediction(saved):
            times = self.compared_seconds, self.expected_seconds, self.compared_dense_seconds
            took, expected, dense = (seconds_text(each / self.expected_steps) for each in times)
            result = (
                f"cannot tell whether compression saved time: an exchange took {took} but was "
                f"predicted at {expected}, and a dense one at {dense}; time a dense run"
            )
        elif saved > 0:
            result = f"compression saved up to {duration_text(saved)} of {run}"
        else:
            result = (
                f"compression cost up to {duration_text(-saved)} of {duration_text(self.seconds)} "
                "(dense by estimate): dense is faster here"
            )
        bits = 8 * self.coded_bytes / self.coded_entries if self.coded_entries else 0.0
        wire = f", wire {bits:.3g} bits an entry" if bits else ""
        over = f"over an {link}, " if link else ""
        return (
            f"{over}{result}; used {self.algorithm}, density "
            f"{self.selected / self.elements:.3g}{wire}; accuracy: compare with a dense run"
        )

    def _contradicts_prediction(self, saved: float) -> bool:
        """Tell whether the prediction at the start named the other method as faster.

        If it was wrong for the exchanges that ran, it says nothing about those that did not run.
        """
        expected, dense = self.expected_seconds, self.compared_dense_seconds
        # Warm-up steps, which have no prediction, decided the outcome.
        if (dense > self.compared_seconds) != (saved > 0):
            return False
        return dense * SAME < expected if saved > 0 else expected * SAME < dense


_NEGLIGIBLE: Final = 0.01  # share of a run; a smaller difference counts as none
SAME: Final = 1.1  # two exchange times that differ by a smaller factor count as equal


class Prediction(Protocol):
    """The cost model's predictions for a step's exchange, and for a dense one; None if unknown."""

    @property
    def seconds(self) -> float | None: ...
    @property
    def dense_seconds(self) -> float | None: ...


@dataclass(eq=False)
class RecordedStep:
    """A step, or a backward pass: the inputs of a report.

    bucket_exchanges: its buckets.
    operations, exchanged: by bucket number.
    spans: begin and end of the engine's work on each bucket, from time.perf_counter.
    """

    bucket_exchanges: list[Any] = field(default_factory=list)
    operations: dict[int, Operation] = field(default_factory=dict)
    exchanged: dict[int, Exchanged] = field(default_factory=dict)
    spans: list[tuple[float, float]] = field(default_factory=list)


def report(
    recorded: RecordedStep,
    *,
    step: int,
    compute_seconds: float,
    waits: Sequence[tuple[float, float]],
    waited_seconds: float | None = None,
    apply_seconds: float = 0.0,
    expected: Prediction | None = None,
    skipped: bool = False,
    samples: int | None = None,
    local_steps: int = 1,
    covers: str = "step",
    model_elements: int = 0,
    gradient_norm: float | None = None,
) -> StepReport:
    """Return the report of a step that has ended.

    waits: begin and end of each time that the program waited, without overlaps.
    waited_seconds: the part of these to report; None for all.
    apply_seconds: time after the exchanges; 0 if the engine's thread applies within them.
    expected: the step's prediction, for exchanges that make none themselves.
    """
    operations, exchanged = recorded.operations.values(), list(recorded.exchanged.values())
    select_seconds = sum(each.select_seconds for each in exchanged)
    communicate_seconds = sum(each.communicate_seconds for each in exchanged)
    agree_seconds = sum(operation.agree_seconds for operation in operations)
    exchange_seconds = select_seconds + communicate_seconds + apply_seconds
    predicted_seconds = dense_seconds = None
    if exchanged:
        predictions = [each.predicted_seconds for each in exchanged]
        if expected is not None:
            predicted_seconds, dense_seconds = expected.seconds, expected.dense_seconds
        # Prefer the predictions of exchanges that choose their algorithm, as Compression.auto does.
        if None not in predictions:
            predicted_seconds = sum(filter(None, predictions))
    if waited_seconds is None:
        waited_seconds = sum(ended - begun for begun, ended in waits)
    return StepReport(
        step=step,
        algorithm="+".join(sorted({each.algorithm for each in exchanged})),
        compute_seconds=compute_seconds,
        synchronize_seconds=waited_seconds,
        select_seconds=select_seconds + apply_seconds,
        apply_seconds=apply_seconds,
        communicate_seconds=communicate_seconds + agree_seconds,
        agree_seconds=agree_seconds,
        merge_seconds=sum(each.merge_seconds for each in exchanged),
        code_seconds=sum(each.coded.seconds for each in exchanged),
        hidden_seconds=sum(seconds_outside(span, waits) for span in recorded.spans),
        working_seconds=sum(ended - begun for begun, ended in recorded.spans),
        buckets=len(recorded.bucket_exchanges),
        exchange_seconds=exchange_seconds if exchanged else 0.0,
        predicted_seconds=predicted_seconds,
        sent_bytes=sum(operation.sent_bytes for operation in operations),
        sent_messages=sum(operation.sent_messages for operation in operations),
        bytes_counted=all(each.bytes_counted for each in exchanged),
        coded_entries=sum(each.coded.entries for each in exchanged),
        coded_bytes=sum(each.coded.bytes for each in exchanged),
        elements=sum(bucket_exchange.elements for bucket_exchange in recorded.bucket_exchanges),
        samples=samples,
        selected=sum(each.selected for each in exchanged),
        updated=sum(each.updated for each in exchanged),
        skipped=skipped,
        local_steps=local_steps,
        covers=covers,
        ranks=max((operation.ranks for operation in operations), default=0),
        dense_seconds=dense_seconds,
        model_elements=model_elements,
        gradient_norm=None if skipped else gradient_norm,
    )


def seconds_outside(span: tuple[float, float], waits: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a span during which the program did not wait."""
    begun, ended = span
    waited = sum(max(0.0, min(ended, until) - max(begun, since)) for since, until in waits)
    return max(0.0, ended - begun - waited)
