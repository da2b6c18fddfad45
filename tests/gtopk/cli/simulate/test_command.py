"""`gtopk simulate` prints its results, marked as simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gtopk.cli import main
from gtopk.cli.simulate.modes import SIMULATED

QUICK = ["--epochs", "1", "--speeds", "200:100", "--batch", "128"]


def test_comparison_is_printed_and_written_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    code = main(
        ["simulate", *QUICK, "--task", "digits-cnn", "--model", "resnet18", "--target", "0.05",
         "--evaluate-every", "700", "--overlap", "0.5",
         "--modes", "balanced,abs", "--json", str(record)]
    )  # fmt: skip
    assert code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Simulated, not measured: 2 ranks of 200:100 samples/s")
    assert "11,689,512 values by gTop-k" in printed
    assert "beside 50 % of a synchronous step's computation" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 80
    written = json.loads(record.read_text())
    assert written["simulated"] is True
    assert [run["mode"] for run in written["records"]] == ["balanced", "abs"]
    assert len(written["records"][0]["accuracy"]) == 3  # after 700, 1400 and all 1437 samples


def test_exchange_time_depends_on_what_the_mode_sends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    words = ["--model", "resnet18", "--modes", "equal,equal-dense", "--json", str(record)]
    assert main(["simulate", *QUICK, *words]) == 0
    written = json.loads(record.read_text())
    sparse, dense = written["reduce_seconds"], written["dense_reduce_seconds"]
    assert 2 * sparse < dense
    steps = [run["steps"] for run in written["records"]]
    exchanges = [run["exchange"] for run in written["records"]]
    assert exchanges == pytest.approx([steps[0] * sparse, steps[1] * dense])
    assert ", dense, as in equal-dense, " in " ".join(capsys.readouterr().out.split())


def test_mode_named_twice_is_simulated_once(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    words = ["--modes", "adaptive-sgd,adaptive-sgd", "--die", "0@1s", "--json", str(record)]
    assert main(["simulate", *QUICK, *words]) == 0
    (only,) = json.loads(record.read_text())["records"]
    assert only["mode"] == "adaptive-sgd"
    link = json.loads(record.read_text())["cluster"]["link"]
    assert (link["latency_seconds"], link["seconds_per_byte"]) == (50e-6, 8e-9)


def test_mode_slow_only_without_slow_ranks_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    words = ["--speeds", "100:100", "--modes", "slow-only", "--json", str(record)]
    assert main(["simulate", *words]) == 2
    assert "slow-only needs a slow rank" in capsys.readouterr().err
    assert not record.exists()


def test_missing_scikit_learn_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["simulate", *QUICK]) == 2
    assert "pip install scikit-learn" in capsys.readouterr().err


def test_diverging_training_ends_and_reports_skipped_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    words = ["--lr", "1e30", "--modes", ",".join(SIMULATED), "--json", str(record)]
    assert main(["simulate", *QUICK, *words]) == 0
    printed = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    _, left_out = printed.split("Not finite, and left out as in a real run: ")
    written = json.loads(record.read_text(), parse_constant=pytest.fail)
    for run in written["records"]:
        assert f"{run['mode']} {run['skipped']} times" in left_out
        assert run["loss"] == [] or run["loss"][-1][1] is None
    assert "not reached" in left_out  # the loss common to all


def test_more_skipped_steps_than_a_real_run_allows_are_simulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--lr", "1e30", "--epochs", "2", "--speeds", "2:1", "--batch", "16"]
    assert main(["simulate", *words, "--modes", "equal"]) == 0
    assert "equal 179 times" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--speeds", "100"], "samples a second of two or more ranks"),
        (["--slow", "0-4"], "must be RANK:FACTOR@TIME"),
        (["--die", "1"], "must be RANK@TIME, such as 1@30s, got '1'"),
        (["--modes", "fast"], "must be one of equal-dense, equal"),
        (["--sizes", "slow=4"], "must be like slow=4:64,fast=32:256"),
        (["--sizes", "slow=64:4"], "thresholds of the class 'slow' are crossed"),
        (["--fast", "one"], "must be ranks, such as 0,2"),
        (["--fast", "\N{SUPERSCRIPT TWO}"], "must be ranks, such as 0,2"),
        (["--slow", "0:0@1s"], "FACTOR must lie in [1e-6, 1e6], got '0'"),
        (["--speeds", "1e300:1e300"], "must lie in 1e-06..1e+09 samples a second"),
        (["--speeds", "nan:1"], "samples a second of two or more ranks"),
        (["--overhead", "1e308s"], "must be at most 1e+09s"),
        (["--density", "2"], "--density: must lie in (0, 1], got '2'"),
        (["--lr", "-1"], "--lr: must lie in (0, inf), got '-1'"),
        (["--momentum", "1"], "--momentum: must lie in [0, 1), got '1'"),
        (["--target", "2"], "--target: must lie in (0, 1], got '2'"),
        (["--overlap", "2"], "--overlap: must lie in [0, 1], got '2'"),
    ],
)
def test_invalid_words_exit_with_the_reason(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *words])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--slow", "2:4@1s", *QUICK], "--slow must name ranks 0..1"),
        (["--die", "2@1s", *QUICK], "--die must name ranks 0..1"),
        (["--fast", "2", *QUICK], "--fast must name ranks 0..1"),
        (
            ["--die", "1@1s", *QUICK, "--modes", "local-sgd,abs"],
            "abs ends if a rank dies; --die is",
        ),
        ([*QUICK, "--batch", "8"], "--batch must be at least 16, got 8"),
        ([*QUICK, "--lr", "1e300"], "--lr must be at most 3.40282e+38, got 1e+300"),
        (["--slow", "2:1e6@1s", *QUICK], "--slow must name ranks 0..1"),
        ([*QUICK, "--modes", "local-sgd", "--json", "/dev/null/x"], "/x cannot be written"),
    ],
)
def test_impossible_cluster_exits_with_the_reason(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    assert text in capsys.readouterr().err


def test_simulation_whose_ranks_all_die_prints_one_error_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", *QUICK, "--modes", "elastic", "--die", "0@1s", "--die", "1@1s"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # after which mode is simulated
    assert lines[1].startswith("gtopk simulate: elastic: every rank has died")
