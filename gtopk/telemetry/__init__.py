"""Telemetry: measures the cost of steps, and records runs for `gtopk report` and `gtopk top`.

    GTOPK_RUN=DIR            a file for each rank, DIR/rank-00000.jsonl, one JSON object a line
    GTOPK_RUN_EVERY=N        write only every Nth step and the last; totals include all steps
    GTOPK_TENSORBOARD=DIR    scalars of rank 0; needs tensorboard
    GTOPK_WANDB=PROJECT      the same at Weights & Biases; needs wandb
    GTOPK_MLFLOW=EXPERIMENT  the same at MLflow; needs mlflow
    GTOPK_PROMETHEUS=PORT    an endpoint of each rank, at 127.0.0.1:PORT + local rank; or HOST:PORT

`gtopk.record(...)` does the same from a script; `gtopk.log(loss=..., accuracy=...)` adds values.
Recording costs the program some microseconds a step: a separate thread writes five times a second.

step_report.py   a step's times, bytes and entries
run_record.py    `record` and `log`; opens each rank's sinks
sinks.py         all sinks but the record's file
recorder.py      collects a rank's events and writes them from a thread
lines.py         the lines of a record
reading.py       reads a record
stragglers.py    finds slow ranks
timeline.py      a trace for Chrome and Perfetto
"""

from __future__ import annotations

from .lines import Line
from .recorder import Sink
from .sinks import scalars_of

__all__ = ["Line", "Sink", "scalars_of"]

from .step_report import StepReport as StepReport
