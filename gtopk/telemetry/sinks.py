"""Sinks of a record besides its file: Prometheus, TensorBoard, Weights & Biases, MLflow.

A rank's Prometheus endpoint serves the metrics of its last step. It is off by default. It has no
password, so it listens on this host only, unless another address is given. One thread serves all
connections, at a bounded cost: a connection is closed after some seconds, and if too many are open,
the oldest is dropped.

The other sinks get scalars of rank 0. Weights & Biases and MLflow use the script's run, or a new
one.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from importlib import import_module
from typing import Any, Final

from ..settings import Address
from .lines import Line, left_in_order, report_of
from .step_report import StepReport, batch, density, parts

_MAX_CONNECTIONS: Final = 16  # open connections at once
_BACKLOG: Final = 1024  # backlog of connections to accept
_CONNECTION_SECONDS: Final = 5.0
_REQUEST_BYTES: Final = 8192
_PATHS: Final = "/", "/metrics"
_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """A sink that serves its lines as metrics at GET /metrics, until `close`.

    address: where it listens, with the actual port if 0 was given.
    Raises OSError if it cannot listen.
    """

    name = "the Prometheus endpoint"

    def __init__(self, address: Address, rank: int) -> None:
        self._metrics = Metrics(rank)
        # Bound in the program's thread, so that the caller gets the error for a port in use.
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._socket = socket.create_server(address, family=family, backlog=_BACKLOG)
        # OverflowError for ports beyond 65535: local ranks count up from the given port.
        except (OSError, OverflowError) as error:
            raise OSError(
                f"cannot serve Prometheus at {address.host}:{address.port}: {error}"
            ) from error
        self.address = Address(address.host, self._socket.getsockname()[1])
        self._connections: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="gtopk-page", daemon=True)
        self._thread.start()

    def take(self, lines: Sequence[Line]) -> None:
        self._metrics.take(lines)

    def close(self) -> None:
        """Stop listening."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._receive, sock=self._socket, limit=_REQUEST_BYTES, backlog=_MAX_CONNECTIONS
        )
        # Restore the backlog: asyncio sets it to the number that it accepts at a time.
        self._socket.listen(_BACKLOG)
        await self._closing.wait()
        # First finish accepted connections: a closed server would leave their sockets open.
        self._loop.remove_reader(self._socket)
        while len(asyncio.all_tasks()) > 1:
            for connection in self._connections:
                connection.transport.abort()
            await asyncio.sleep(0)
        server.close()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = None
        if len(self._connections) > _MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        try:
            await asyncio.wait_for(self._answer(reader, writer), _CONNECTION_SECONDS)
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # the client left, sent no request, or took too long
        finally:
            writer.transport.abort()
            self._connections.pop(writer, None)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        # Pad with "": a malformed request line may have fewer words.
        method, path, *_ = [*request.decode("latin-1").split("\r\n")[0].split(" "), "", ""]
        if method != "GET":
            status, text = HTTPStatus.METHOD_NOT_ALLOWED, f"GET {_PATHS[-1]}\n"
        elif path.partition("?")[0] not in _PATHS:
            status, text = HTTPStatus.NOT_FOUND, f"GET {_PATHS[-1]}\n"
        else:
            status, text = HTTPStatus.OK, self._metrics.text()
        body = text.encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        writer.close()
        # Wait until the client has received everything: the caller aborts the connection.
        await writer.wait_closed()


_HELP: Final[Mapping[str, tuple[str, str]]] = {
    "gtopk_steps_total": ("counter", "Optimizer steps of this rank."),
    "gtopk_skipped_steps_total": ("counter", "Steps that no rank applied: a NaN somewhere."),
    "gtopk_divergences_total": ("counter", "Replica checks that found a difference."),
    "gtopk_sent_bytes_total": ("counter", "Bytes this rank has sent for its steps."),
    "gtopk_step_seconds": ("gauge", "Wall clock of the last step, by part."),
    "gtopk_hidden_seconds": ("gauge", "Time of the last step's exchange that backward hid."),
    "gtopk_density": ("gauge", "Share of the values that this rank sent in the last step."),
    "gtopk_predicted_seconds": ("gauge", "Predicted time of the last step's exchange."),
    "gtopk_exchange_seconds": ("gauge", "Measured time of the last step's exchange."),
    "gtopk_batch_samples": ("gauge", "Samples of this rank in its last optimizer step."),
    "gtopk_local_steps": ("gauge", "Optimizer steps of this rank in the last report."),
    "gtopk_straggler_score": ("gauge", "Computing speed of this rank; the fastest has 1."),
    "gtopk_residual_norm": ("gauge", "Norm of this rank's residual."),
    "gtopk_residual_age_steps": ("gauge", "Age of this rank's residual in steps."),
    "gtopk_value": ("gauge", "Values that the script logged."),
}


_STEPS: Final = "gtopk_steps_total", ""
_SKIPPED: Final = "gtopk_skipped_steps_total", ""
_DIVERGED: Final = "gtopk_divergences_total", ""


class Metrics:
    """A rank's metrics, by name and label; safe to use from several threads."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = dict.fromkeys((_STEPS, _SKIPPED, _DIVERGED), 0)

    def take(self, lines: Sequence[Line]) -> None:
        with self._lock:
            for line in lines:
                for metric, value in _metrics_of(line).items():
                    # Drop a metric that this step lacks: its old value would look new.
                    if value is None:
                        self._values.pop(metric, None)
                    else:
                        self._values[metric] = value
                if line["what"] == "step":
                    self._values[_STEPS] = line["step"] + 1
                    self._values[_SKIPPED] += line["skipped"]
                self._values[_DIVERGED] += line["what"] == "parted"

    def text(self) -> str:
        """Return all metrics in Prometheus's text format."""
        # Copy first: formatting takes longer than the recorder's thread should wait.
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, (kind, about) in _HELP.items():
            found = {label: value for (metric, label), value in values.items() if metric == name}
            if not found:
                continue
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            for label, value in found.items():
                more_labels = f",{label}" if label else ""
                # Prometheus's spelling.
                number = f"{value}".replace("nan", "NaN").replace("inf", "Inf")
                lines.append(f'{name}{{rank="{self._rank}"{more_labels}}} {number}')
        return "\n".join(lines) + "\n"


def _metrics_of(line: Line) -> dict[tuple[str, str], float | None]:
    """Return a line's values by metric and label; None for a metric without a value in it."""
    if line["what"] == "values":
        return {("gtopk_value", f'name="{_quoted(k)}"'): v for k, v in line["values"].items()}
    if line["what"] == "withheld":
        return {
            ("gtopk_residual_norm", ""): line["norm"],
            ("gtopk_residual_age_steps", ""): line["age_steps"],
        }
    if line["what"] == "score":
        return {("gtopk_straggler_score", ""): line["score"]}
    if line["what"] != "step":
        return {}
    step = report_of(line)
    found: dict[str, float | None] = {
        "gtopk_sent_bytes_total": line["bytes_so_far"],
        "gtopk_hidden_seconds": step.hidden_seconds,
        "gtopk_density": density(step),
        "gtopk_predicted_seconds": step.predicted_seconds,
        "gtopk_exchange_seconds": step.exchange_seconds,
        "gtopk_batch_samples": batch(step),
        "gtopk_local_steps": None if step.covers == "step" else step.local_steps,
    }
    return {
        **{("gtopk_step_seconds", f'part="{part}"'): each for part, each in parts(step).items()},
        **{(name, ""): value for name, value in found.items()},
    }


def _quoted(text: str) -> str:
    # Backslashes first: the other replacements add backslashes that must stay.
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _Tracker:
    """Base of the sinks of scalars, which continue in the next world after a recovery.

    Adds up a rank's bytes over all worlds of a run, because each world's lines begin at 0. Raises
    ImportError if the tracker's package is not installed.
    """

    name = ""
    continues = True

    def __init__(self) -> None:
        self._bytes_before = self._bytes_here = 0
        self._has_failed = False  # this rank did not leave in order

    def _imported(self, module: str, package: str) -> Any:
        """Import and return a module of the tracker's package."""
        try:
            return import_module(module)
        except ImportError as error:
            raise ImportError(
                f"{self.name} needs {package} ({error}): pip install {package}"
            ) from error

    def _scalars(self, line: Line) -> Iterator[tuple[str, float]]:
        """Yield the scalars of a line, with the bytes of earlier worlds added."""
        if line["what"] == "end":
            self._has_failed |= not left_in_order(line)
        if line["what"] == "begin":
            self._bytes_before, self._bytes_here = self._bytes_before + self._bytes_here, 0
        if line["what"] == "step":
            self._bytes_here = line["bytes_so_far"]
            line = {**line, "bytes_so_far": self._bytes_before + self._bytes_here}
        yield from scalars_of(line)


class Scalars(_Tracker):
    """Writes lines as TensorBoard scalars."""

    name = "TensorBoard's record"

    def __init__(self, folder: str) -> None:
        super().__init__()
        tensorboard = self._imported("torch.utils.tensorboard", "tensorboard")
        self._writer = tensorboard.SummaryWriter(folder)

    def take(self, lines: Sequence[Line]) -> None:
        for line in lines:
            for name, value in self._scalars(line):
                self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def scalars_of(line: Line) -> Iterator[tuple[str, float]]:
    """Yield the names and values of the scalars in a line."""
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
    """Yield the names and values of a step's costs."""
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
    if step.gradient_norm is not None:
        yield "gtopk/gradient norm", step.gradient_norm
    if step.covers != "step":
        yield "gtopk/local steps", step.local_steps
    if step.predicted_seconds is not None:
        yield "gtopk/exchange, predicted seconds", step.predicted_seconds
        yield "gtopk/exchange, measured seconds", step.exchange_seconds


# MLflow raises for names with these characters, and then drops all values of the call.
_NO_METRIC_NAME: Final = re.compile(r"[^\w.\- :/]")


class Wandb(_Tracker):
    """Logs to Weights & Biases.

    project: for a new run, which ends with the record. A run that the script began stays open.
    gtopk's steps have their own axis: the script may log with other step numbers.
    """

    name = "the record at Weights & Biases"

    def __init__(self, project: str) -> None:
        super().__init__()
        wandb = self._imported("wandb", "wandb")
        self._owns_run = wandb.run is None
        self._run = wandb.run or wandb.init(project=project)
        for names in ("gtopk/*", "gtopk seconds/*"):
            self._run.define_metric(names, step_metric="gtopk/step")

    def take(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if values := dict(self._scalars(line)):
                self._run.log({**values, "gtopk/step": line["step"]})

    def close(self) -> None:
        """End the run if this sink began it."""
        if self._owns_run:
            self._run.finish(exit_code=int(self._has_failed))


class MLflow(_Tracker):
    """Logs to MLflow.

    experiment: for a new run, which ends with the record. The script's active run stays open.
    """

    name = "the record at MLflow"

    def __init__(self, experiment: str) -> None:
        super().__init__()
        mlflow = self._imported("mlflow", "mlflow")
        # An active run belongs to one thread, but the recorder's thread delivers the lines.
        self._client = mlflow.MlflowClient()
        self._metric = self._imported("mlflow.entities", "mlflow").Metric
        active = mlflow.active_run()
        self._owns_run = active is None
        if active is None:
            experiment_id = mlflow.set_experiment(experiment).experiment_id
            active = self._client.create_run(experiment_id)
        self._run = active.info.run_id

    def take(self, lines: Sequence[Line]) -> None:
        now = int(1e3 * time.time())
        metrics = [
            self._metric(_metric_name(name), value, now, line["step"])
            for line in lines
            for name, value in self._scalars(line)
        ]
        # MLflow rejects larger batches.
        for begin in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics[begin : begin + 1000])

    def close(self) -> None:
        """End the run if this sink began it."""
        if self._owns_run:
            self._client.set_terminated(self._run, "FAILED" if self._has_failed else "FINISHED")


def _metric_name(name: str) -> str:
    """Return a name that MLflow accepts: "acc@1" becomes "acc_1"."""
    # MLflow also raises for a name that is not a normalized path.
    plain = _NO_METRIC_NAME.sub("_", name.replace(",", ""))
    return posixpath.normpath(f"/{plain}").lstrip("/") or "_"
