"""A rank's record is written soon and completely, however the rank ends."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gtopk
import gtopk.torch as hvd
from collectives.vector import SparseVector
from gtopk.cli.report import events
from gtopk.exchange.residual import Residual, ResidualSize
from gtopk.runtime.world import world
from gtopk.settings import Address, parse_address
from gtopk.telemetry import run_record
from gtopk.telemetry.lines import as_text, path_of, report_of, step_line
from gtopk.telemetry.reading import read_run
from gtopk.telemetry.recorder import Recorder, is_sampling_due, sample_residual
from gtopk.telemetry.run_record import LineFile, Settings, recorder_of, settings_from
from gtopk.telemetry.sinks import Endpoint, Metrics
from gtopk.telemetry.step_report import batch
from tests.gtopk.made_runs import begin, report
from tests.started import under


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(transport: Any, folder: Path, steps: int, compression: Any) -> Any:
    with world.entered(transport) as here:
        gtopk.record(str(folder))
        model = torch.nn.Linear(30, 10)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
        )
        for step in range(steps):
            optimizer.set_num_samples(8 + here.rank)
            model(torch.randn(8, 30)).square().sum().backward()
            if step == 2 and here.rank == 1:
                model.weight.grad[0] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
            gtopk.log(loss=torch.tensor(1.0 / (step + 1), requires_grad=True))
        return optimizer.last_step


def test_each_rank_writes_its_steps_values_and_residual_samples(
    tmp_path: Path, threads: Callable[..., Any]
) -> None:
    steps, ranks = 24, 3
    gtopk_10 = hvd.Compression.gtopk(0.1, dense_under=0)
    last = threads(ranks, lambda transport: train(transport, tmp_path, steps, gtopk_10))
    for rank in range(ranks):
        first, *lines = lines_in(path_of(tmp_path, rank))
        assert (first["what"], first["rank"], first["ranks"]) == ("begin", rank, ranks)
        found = [line for line in lines if line["what"] == "step"]
        assert [line["step"] for line in found] == list(range(steps))
        assert [line["step"] for line in found if line["skipped"]] == [2]
        assert {line["samples"] for line in found} == {8 + rank}
        assert found[-1]["bytes_so_far"] == sum(line["sent_bytes"] for line in found)
        assert found[-1]["coded_bytes"] > 4 * found[-1]["coded_entries"] > 0
        assert found[-1]["elements"] == 310
        assert report_of(found[-1]).synchronize_seconds == pytest.approx(
            last[rank].synchronize_seconds
        )
        logged = [line["values"] for line in lines if line["what"] == "values"]
        assert [value["loss"] for value in logged] == pytest.approx(
            [1 / (n + 1) for n in range(steps)]
        )
        residual_lines = [line for line in lines if line["what"] == "withheld"]
        # After 1, 2, 4, 8 and 16 steps that counted; that of step 2 did not.
        assert [line["step"] for line in residual_lines] == [0, 1, 4, 8, 16]
        assert all(line["norm"] > 0 and line["age_steps"] > 0 for line in residual_lines)
        assert lines[-1]["what"] == "end"
    (began,) = {lines_in(path_of(tmp_path, rank))[0]["began_unix_seconds"] for rank in range(ranks)}
    assert began > 0


def test_log_samples_counts_batches_of_accumulation_and_local_sgd(
    tmp_path: Path, threads: Callable[..., Any]
) -> None:
    def program(transport: Any) -> None:
        with world.entered(transport) as here:
            gtopk.record(str(tmp_path))
            models = [torch.nn.Linear(30, 10) for _ in range(2)]
            plain, local = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in models)
            hvd.broadcast_parameters(models[1].state_dict(), 0)

            def step(model: torch.nn.Module, optimizer: Any, *sizes: int) -> None:
                for size in sizes:
                    gtopk.log_samples(size)
                    model(torch.randn(size, 30)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            accumulating = hvd.DistributedOptimizer(plain, backward_passes_per_step=2)
            step(models[0], accumulating, 3, 4 + here.rank)
            accumulating.set_backward_passes_per_step(1)
            accumulating.set_num_samples(5)  # has precedence, and does not apply to later steps
            step(models[0], accumulating, 6)
            accumulating.set_num_samples(None)
            models[0](torch.randn(7, 30)).sum().backward()
            accumulating.step()
            local_sgd = gtopk.LocalSGD(local, inner_steps=2)
            for size in (8, 9, 10, 11):
                step(models[1], local_sgd, size)

    threads(2, program)
    for rank in read_run(tmp_path).ranks:
        samples = [step.report.samples for step in rank.steps]
        assert samples == [7 + rank.rank, 5, None, 8 + 9, 10 + 11]
        assert [batch(step.report) for step in rank.steps][-1] == (10 + 11) / 2
        assert rank.steps[-1].samples_so_far == 7 + rank.rank + 5 + 8 + 9 + 10 + 11


def test_integer_too_large_for_float_is_recorded_as_not_finite(tmp_path: Path) -> None:
    hvd.init()
    gtopk.record(str(tmp_path))
    gtopk.log(many=10**400)
    hvd.shutdown()
    (rank,) = read_run(tmp_path).ranks
    assert [note.content for note in rank.values] == [{"many": None}]


@pytest.mark.parametrize(("count", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_log_samples_rejects_negative_or_fractional_count(count: Any, error: type) -> None:
    with pytest.raises(error):
        gtopk.log_samples(count)


def test_nothing_is_recorded_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gtopk.log(loss=1.0)  # before init, too
    gtopk.log_samples(8)
    hvd.init()
    gtopk.log(loss=1.0)
    gtopk.log_samples(8)
    assert recorder_of(world.current()) is None
    hvd.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_gtopk_run_variable_starts_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GTOPK_RUN", str(tmp_path / "run"))
    for _ in range(2):  # two runs in turn in one folder
        hvd.init()
        logging.getLogger("gtopk").warning("said in the run")
        hvd.shutdown()
        logging.getLogger("gtopk").warning("said after it")
    lines = lines_in(path_of(tmp_path / "run", 0))
    assert [line["what"] for line in lines] == ["begin", "message", "end"] * 2
    assert lines[1]["text"] == "said in the run"
    assert lines[2]["how"].startswith("called shutdown() at step 0")


def test_second_run_in_one_folder_is_logged_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GTOPK_RUN", str(tmp_path / "run"))

    def run() -> None:
        hvd.init()
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        hvd.shutdown()

    with caplog.at_level("INFO", "gtopk"):
        for _ in range(2):
            assert "earlier run" not in caplog.text
            run()
            run_record._written.clear()  # as in another process
        assert "earlier run" in caplog.text
    found = read_run(tmp_path / "run")
    assert found.earlier_runs == 1
    assert ("this folder", "also holds an earlier run; the last one is shown") in events(found)


def test_unwritable_record_warns_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GTOPK_RUN", str(tmp_path / "file" / "run"))
    hvd.init()
    hvd.shutdown()
    assert "rank 0 trains without the sink of GTOPK_RUN: " in caplog.text


def test_new_line_begins_after_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_text(as_text(begin()) + '{"what": "st')
    file = LineFile(path)
    file.take([begin(step=7)])
    file.close()
    _, truncated, complete = path.read_text().splitlines()
    assert truncated == '{"what": "st'
    assert json.loads(complete)["step"] == 7


class Failing:
    """A sink that fails at a call; it must be dropped and not called again."""

    name = "the failing one"

    def __init__(self, at: str, error: Exception) -> None:
        self._at, self._error = at, error
        self.called: list[str] = []

    def take(self, lines: Any) -> None:
        self._call("take")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.called.append(name)
        if name == self._at:
            raise self._error


@pytest.mark.parametrize(
    "error", [OSError("no space left on device"), RuntimeError("its writer has ended")]
)
def test_failing_sink_stops_neither_other_sinks_nor_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    failing, kept = Failing("take", error), LineFile(tmp_path / "kept")
    recorder = Recorder([failing, kept], begin(), 0.0, 1, lambda: 5)
    recorder.note("values", values={"loss": float("nan")})
    recorder.flush()
    recorder.end("it is enough")
    recorder.end("only the first reason counts")
    recorder.close()
    assert failing.called == ["take", "close"]
    assert caplog.messages == [
        f"the failing one stopped ({type(error).__name__}: {error}); training continues"
    ]
    lines = lines_in(tmp_path / "kept")
    values = [line["values"] for line in lines if line["what"] == "values"]
    assert values == [{"loss": None}]  # JSON has no NaN
    assert [line["how"] for line in lines if line["what"] == "end"] == ["it is enough"]


def test_sink_that_fails_to_close_does_not_keep_others_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing("close", RuntimeError("its writer has ended"))
    other = Failing("nowhere", RuntimeError())
    recorder = Recorder([failing, other], begin(), 0.0, 1, lambda: 5)
    recorder.close()
    assert failing.called == other.called == ["take", "close"]
    assert len(caplog.messages) == 1


def test_every_nth_step_is_written_with_totals_of_all_steps(
    tmp_path: Path,
) -> None:
    recorder = Recorder([LineFile(tmp_path / "file")], begin(), 0.0, 10, lambda: 0)
    for step in range(32):
        recorder.note_step(report(step, skipped=step == 4))
    for _ in range(2):
        recorder.end("it is enough")
    recorder.close()
    *steps, end = lines_in(tmp_path / "file")[1:]
    assert end["what"] == "end"
    assert [line["step"] for line in steps] == [0, 4, 9, 19, 29, 31]  # always the last one
    assert [line["bytes_so_far"] for line in steps] == [1200 * n for n in (1, 5, 10, 20, 30, 32)]
    assert [line["samples_so_far"] for line in steps] == [32 * n for n in (1, 5, 10, 20, 30, 32)]


def test_last_step_is_written_only_once(tmp_path: Path) -> None:
    recorder = Recorder([LineFile(tmp_path / "file")], begin(), 0.0, 10, lambda: 0)
    for step in range(20):
        recorder.note_step(report(step))
    recorder.end("it is enough")
    recorder.close()
    assert [line["step"] for line in lines_in(tmp_path / "file")[1:-1]] == [0, 9, 19]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"GTOPK_RUN_EVERY": "0"}, "GTOPK_RUN_EVERY must be a whole number of steps"),
        ({"GTOPK_RUN_EVERY": "often"}, "GTOPK_RUN_EVERY must be a whole number of steps"),
        ({"GTOPK_PROMETHEUS": "yes"}, "GTOPK_PROMETHEUS must be PORT or HOST:PORT"),
        ({"GTOPK_PROMETHEUS": "\N{SUPERSCRIPT TWO}"}, "GTOPK_PROMETHEUS must be PORT or HOST"),
    ],
)
def test_invalid_settings_raise(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        under(variables, settings_from)
    assert not under({}, settings_from).is_enabled
    assert Settings(run="a").is_enabled


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prometheus": "yes"}, "^prometheus must be PORT or HOST:PORT, such as 9400, got 'yes'"),
        ({"every": 0}, "^every must be at least 1 step, got 0"),
    ],
)
def test_invalid_record_arguments_raise_with_the_name_of_the_argument(
    arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        gtopk.record("runs", **arguments)


# ---- Prometheus


def test_endpoint_listens_on_loopback_by_default() -> None:
    assert parse_address("9400") == Address("127.0.0.1", 9400)
    assert parse_address("0.0.0.0:9400") == Address("0.0.0.0", 9400)


def test_endpoint_serves_metrics_of_the_last_step() -> None:
    endpoint = Endpoint(Address("127.0.0.1", 0), rank=3)
    try:
        endpoint.take([begin()])
        endpoint.take([step_line(report(4, skipped=True), 1.0, 6000, 160)])
        endpoint.take([step_line(report(5), 1.1, 7200, 192)])
        at = {"seconds": 1.0, "step": 6}
        endpoint.take([{"what": "withheld", **at, "norm": 2.5, "age_steps": None}])
        endpoint.take([{"what": "score", **at, "score": 0.2}])
        endpoint.take([{"what": "parted", **at, "parameters": ["w"], "healed": True}])
        endpoint.take([{"what": "values", **at, "values": {'a "loss"': 0.25, "nan": float("nan")}}])
        url = f"http://127.0.0.1:{endpoint.address.port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/else", timeout=10)
    finally:
        endpoint.close()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert values['gtopk_steps_total{rank="3"}'] == "6"
    assert values['gtopk_skipped_steps_total{rank="3"}'] == "1"
    assert values['gtopk_divergences_total{rank="3"}'] == "1"
    assert values['gtopk_sent_bytes_total{rank="3"}'] == "7200"
    assert float(values['gtopk_step_seconds{rank="3",part="exchange"}']) == pytest.approx(0.0011)
    assert values['gtopk_straggler_score{rank="3"}'] == "0.2"
    assert values['gtopk_residual_norm{rank="3"}'] == "2.5"
    assert values['gtopk_value{rank="3",name="a \\"loss\\""}'] == "0.25"
    assert values['gtopk_value{rank="3",name="nan"}'] == "NaN"
    assert "gtopk_residual_age_steps" not in text
    assert text.count("# TYPE gtopk_step_seconds gauge") == 1


def test_large_counts_are_served_with_all_digits() -> None:
    metrics = Metrics(rank=0)
    metrics.take([step_line(report(1_234_567_889), 1.0, 1_234_567_890_123, 0)])
    assert 'gtopk_steps_total{rank="0"} 1234567890\n' in metrics.text()
    assert 'gtopk_sent_bytes_total{rank="0"} 1234567890123\n' in metrics.text()


def test_metric_without_a_current_value_is_removed() -> None:
    metrics = Metrics(rank=0)
    metrics.take([step_line(report(1, predicted_seconds=0.25), 1.0, 1, 0)])
    assert "gtopk_predicted_seconds{" in metrics.text()
    metrics.take([{"what": "withheld", "norm": 2.5, "age_steps": 3.0}])
    metrics.take([step_line(report(2, predicted_seconds=None), 2.0, 2, 0)])
    assert "gtopk_predicted_seconds{" not in metrics.text()
    assert 'gtopk_residual_age_steps{rank="0"} 3.0' in metrics.text()
    metrics.take([{"what": "withheld", "norm": 2.5, "age_steps": None}])
    assert "gtopk_residual_age_steps{" not in metrics.text()


# ---- the residual


def test_residual_norm_and_age_are_sampled(tmp_path: Path) -> None:
    length, k = 200_000, 1000
    residual = Residual(length, np.dtype(np.float32))
    values = np.random.default_rng(0).standard_normal(length).astype(np.float32)
    picked = residual.accumulate_and_select(values, k)
    residual.remove_sent(picked, SparseVector.empty(length, np.dtype(np.float32)), picked)
    left = np.float64(residual.values)
    sent = float(abs(np.float64(picked.values)).sum())
    found = residual.residual_size()
    assert found.sent_mass == pytest.approx(sent, rel=1e-5)
    assert found.square == pytest.approx(float((left**2).sum()), rel=1e-5)
    assert found.mass == pytest.approx(float(abs(left).sum()), rel=1e-5)

    class BucketExchange:
        def residual_size(self) -> ResidualSize:
            return found

    recorder = Recorder([LineFile(tmp_path / "file")], begin(), 0.0, 1, lambda: 3)
    sample_residual(recorder, [BucketExchange(), BucketExchange()])
    recorder.close()
    line = lines_in(tmp_path / "file")[-1]
    assert line["norm"] == pytest.approx((2 * found.square) ** 0.5)
    assert line["age_steps"] == pytest.approx(found.mass / sent, rel=1e-4)


def test_residual_sampling_becomes_rarer() -> None:
    assert [n for n in range(1, 201) if is_sampling_due(n)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        50,
        100,
        150,
        200,
    ]


def test_step_line_of_earlier_version_gets_defaults() -> None:
    line = step_line(report(), 0.0, 0, 0)
    del line["covers"], line["local_steps"]
    assert report_of(line) == report(covers="step", local_steps=1)
    del line["selected"]
    with pytest.raises(KeyError, match="selected"):
        report_of(line)
