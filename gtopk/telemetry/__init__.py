"""Telemetry: the cost of steps, and a run's record for `gtopk report` and `gtopk top`.

    GTOPK_RUN=DIR            a file for each rank, DIR/rank-00000.jsonl, one JSON object a line
    GTOPK_RUN_EVERY=N        write only every Nth step and the last; totals include all steps
    GTOPK_TENSORBOARD=DIR    scalars of rank 0, where tensorboard is installed
    GTOPK_WANDB=PROJECT      the same at Weights & Biases, where wandb is installed
    GTOPK_MLFLOW=EXPERIMENT  the same at MLflow, where mlflow is installed
    GTOPK_PROMETHEUS=PORT    an endpoint of each rank, at 127.0.0.1:PORT + local rank; or HOST:PORT

`gtopk.record(...)` does the same from a script; `gtopk.log(loss=..., accuracy=...)` adds values.
A step costs its program some microseconds: a separate thread writes, five times a second.

step_report.py   a step's times, bytes and entries
run_record.py    `record`, `log`, and which ranks have which sinks; sinks.py: all but the file
recorder.py      the thread that writes; lines.py: what; reading.py: read again
stragglers.py    which ranks are slow; timeline.py: a trace for Chrome and Perfetto
"""

from __future__ import annotations

from .lines import Line
from .recorder import Sink
from .sinks import scalars_of

__all__ = ["Line", "Sink", "scalars_of"]

from .step_report import StepReport as StepReport
