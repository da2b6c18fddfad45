"""Scalars of rank 0, for TensorBoard, Weights & Biases and MLflow.

At the latter two they go to the script's run, or to a new one.
"""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Iterator, Sequence
from typing import Final

from .lines import Line, left_in_order, report_of
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


# MLflow raises for the names of others, and takes nothing of what came with them.
_NO_METRIC_NAME: Final = re.compile(r"[^\w.\- :/]")


class Wandb:
    """Logs to Weights & Biases; raises ImportError where wandb is not installed.

    project: of a new run, which ends with the record; one that the script has begun stays its own.
    Steps are gtopk's, on an axis of their own: the script may log by others.
    """

    name = "the record at Weights & Biases"
    goes_on = True  # in the next world, after elastic's recovery

    def __init__(self, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f"Weights & Biases needs wandb ({error}): pip install wandb"
            ) from error
        self._is_ours = wandb.run is None
        self._run = wandb.run or wandb.init(project=project)
        self._has_failed = False
        for names in ("gtopk/*", "gtopk seconds/*"):
            self._run.define_metric(names, step_metric="gtopk/step")

    def take(self, lines: Sequence[Line]) -> None:
        """Log lines."""
        self._has_failed |= _tell_of_failure(lines)
        for line in lines:
            if values := dict(scalars_of(line)):
                self._run.log({**values, "gtopk/step": line["step"]})

    def close(self) -> None:
        """End the run, if it was begun here."""
        if self._is_ours:
            self._run.finish(exit_code=int(self._has_failed))


class MLflow:
    """Logs to MLflow; raises ImportError where mlflow is not installed.

    experiment: of a new run, which ends with the record; the script's active run stays its own.
    """

    name = "the record at MLflow"
    goes_on = True  # in the next world, after elastic's recovery

    def __init__(self, experiment: str) -> None:
        try:
            import mlflow
            from mlflow.entities import Metric
        except ImportError as error:
            raise ImportError(
                f"MLflow's record needs mlflow ({error}): pip install mlflow"
            ) from error
        # An active run is one of a thread, and lines are taken in the recorder's.
        self._client, self._metric = mlflow.MlflowClient(), Metric
        active = mlflow.active_run()
        self._is_ours = active is None
        if active is None:
            of = mlflow.set_experiment(experiment).experiment_id
            active = self._client.create_run(of)
        self._run = active.info.run_id
        self._has_failed = False

    def take(self, lines: Sequence[Line]) -> None:
        """Log lines."""
        self._has_failed |= _tell_of_failure(lines)
        now = int(1e3 * time.time())
        metrics = [
            self._metric(_metric_name(name), value, now, line["step"])
            for line in lines
            for name, value in scalars_of(line)
        ]
        for begin in range(0, len(metrics), 1000):  # it takes no more at once
            self._client.log_batch(self._run, metrics[begin : begin + 1000])

    def close(self) -> None:
        """End the run, if it was begun here."""
        if self._is_ours:
            self._client.set_terminated(self._run, "FAILED" if self._has_failed else "FINISHED")


def _tell_of_failure(lines: Sequence[Line]) -> bool:
    """Tell whether this rank has left otherwise than in order."""
    return any(line["what"] == "end" and not left_in_order(line) for line in lines)


def _metric_name(name: str) -> str:
    """Return a name as MLflow takes it, by which "acc@1" is "acc_1"."""
    plain = _NO_METRIC_NAME.sub("_", name.replace(",", ""))
    return posixpath.normpath(f"/{plain}").lstrip("/") or "_"
