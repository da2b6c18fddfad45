"""Weights & Biases and MLflow: scalars of rank 0, in the script's run there or in a new one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .lines import Line
from .scalars import scalars_of


class Wandb:
    """Logs to Weights & Biases; raises ImportError where wandb is not installed.

    project: of a new run, which ends with the record; one that the script has begun stays its own.
    Steps are gtopk's, on an axis of their own: the script may log by others.
    """

    name = "the record at Weights & Biases"

    def __init__(self, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f"Weights & Biases needs wandb ({error}): pip install wandb"
            ) from error
        self._is_ours = wandb.run is None
        self._run = wandb.run or wandb.init(project=project)
        for names in ("gtopk/*", "gtopk seconds/*"):
            self._run.define_metric(names, step_metric="gtopk/step")

    def take(self, lines: Sequence[Line]) -> None:
        """Log lines."""
        for line in lines:
            if values := dict(scalars_of(line)):
                self._run.log({**values, "gtopk/step": line["step"]})

    def close(self) -> None:
        """End the run, if it was begun here."""
        if self._is_ours:
            self._run.finish()


class MLflow:
    """Logs to MLflow; raises ImportError where mlflow is not installed.

    experiment: of a new run, which ends with the record; the script's active run stays its own.
    """

    name = "the record at MLflow"

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

    def take(self, lines: Sequence[Line]) -> None:
        """Log lines."""
        now = int(1e3 * time.time())
        metrics = [
            self._metric(name.replace(",", ""), value, now, line["step"])  # it refuses commas
            for line in lines
            for name, value in scalars_of(line)
        ]
        for begin in range(0, len(metrics), 1000):  # it takes no more at once
            self._client.log_batch(self._run, metrics[begin : begin + 1000])

    def close(self) -> None:
        """End the run, if it was begun here."""
        if self._is_ours:
            self._client.set_terminated(self._run)
