"""Scalars for TensorBoard, of rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .lines import Line, report_of
from .step_report import StepReport, batch, density, parts


class Scalars:
    """Writes lines as TensorBoard's scalars; raises ImportError where it is not installed."""

    name = "TensorBoard's record"

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoard's scalars need tensorboard ({error}): pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(folder)

    def take(self, lines: Sequence[Line]) -> None:
        """Write lines."""
        for line in lines:
            for name, value in scalars_of(line):
                self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def scalars_of(line: Line) -> Iterator[tuple[str, float]]:
    """Yield the names and values of what a line says."""
    if line["what"] == "values":
        yield from line["values"].items()
    elif line["what"] == "withheld":
        yield "gtopk/residual norm", line["norm"]
        if line["age_steps"] is not None:
            yield "gtopk/residual age, steps", line["age_steps"]
    elif line["what"] == "step":
        yield "gtopk/sent bytes so far", line["bytes_so_far"]
        yield from scalars_of_step(report_of(line))


def scalars_of_step(step: StepReport) -> Iterator[tuple[str, float]]:
    """Yield the names and values of what a step cost."""
    for part, seconds in parts(step).items():
        yield f"gtopk seconds/{part}", seconds
    yield "gtopk/sent bytes", step.sent_bytes
    yield "gtopk/hidden seconds", step.hidden_seconds
    if (share := density(step)) is not None:
        yield "gtopk/density", share
    if step.coded_entries:
        yield "gtopk/bits per entry", 8 * step.coded_bytes / step.coded_entries
    if (samples := batch(step)) is not None:
        yield "gtopk/samples", samples
    if step.covers != "step":
        yield "gtopk/local steps", step.local_steps
    if step.predicted_seconds is not None:
        yield "gtopk/exchange, predicted seconds", step.predicted_seconds
        yield "gtopk/exchange, measured seconds", step.exchange_seconds
