"""A small run of the demo: real ranks, real data, and the files it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gtopk.cli import main
from gtopk.cli.demo import TRAIN_IMAGES, Plan, equal_bytes_density
from gtopk.cli.demo.verdicts import METHODS, OVER_LINK
from gtopk.cli.simulate.setting import TEST_IMAGES
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[4]


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gtopk", "demo", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": STARTED_PATH},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture(scope="module")
def finished_demo(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("a folder with spaces")
    ended = demo(
        folder,
        "--ranks",
        "3",
        "--seeds",
        "2",
        "--epochs",
        "2",
        "--density",
        "0.05",
        "--link",
        "50mbit,1ms",
    )
    assert ended.returncode == 0, ended.stderr
    return ended, folder


def test_demo_writes_one_record_per_method(finished_demo):
    _, folder = finished_demo
    records = json.loads((folder / "report" / "results.json").read_text())
    assert [record["method"] for record in records] == [*METHODS, *OVER_LINK]
    links = [record["link"].replace("\N{NO-BREAK SPACE}", " ") for record in records]
    assert links == [""] * 4 + ["50 Mbit/s, 1 ms"] * 2
    for record in records:
        assert {"accuracy", "bytes_per_step", "density", "seconds"} <= record.keys()
        assert 0.1 < record["accuracy"] <= 1
        assert record["seconds"] > 0
        assert record["ranks"] == 3
        assert record["final_replicas_identical"]
        assert len(record["accuracy_by_epoch"]) == (1 if record["link"] else 2)
        for losses, seconds in zip(
            record["loss_by_epoch"], record["seconds_by_epoch"], strict=True
        ):
            assert losses[-1] < losses[0]
            assert seconds[0] == 0
            assert sorted(seconds) == seconds
        assert ("emulated link of 50 Mbit/s, 1 ms" in record["machine"]["mpi"]) == bool(
            record["link"]
        )
        assert len(record["accuracy_by_epoch"][0]) == 2
        assert record["steps"] == 2 * (1437 // (3 * 32))
        assert min(record["step_seconds"].values()) > 0  # dense also copies into its bucket
        dense = record["method"] == "dense"
        assert record["bytes_counted"] == (not dense)
        assert (record["merge_seconds"] == 0) == dense
        assert record["merge_seconds"] < record["step_seconds"]["communicate"]


def test_recorded_bytes_match_the_algorithms(finished_demo):
    _, folder = finished_demo
    dense, topk, gtopk, equal, *linked = json.loads(
        (folder / "report" / "results.json").read_text()
    )
    n, k = dense["parameters"], topk["selected"]
    assert k == gtopk["selected"] == round(0.05 * n)
    assert dense["bytes_per_step"] == pytest.approx(2 * 2 / 3 * n * 4, rel=1e-3)
    entry_bytes = 2 + 4  # a 16-bit offset and a float32; the blocks' counts take less than 1 %
    assert topk["bytes_per_step"] == pytest.approx(2 * k * entry_bytes, rel=0.01)
    # With 3 ranks, rank 2 sends its picks to rank 0 and receives the result, up to twice as long:
    # five lists in total, minus entries that several ranks picked.
    assert 4.2 / 3 < gtopk["bytes_per_step"] / (k * entry_bytes) < 5 / 3
    assert linked[1]["bytes_per_step"] == pytest.approx(gtopk["bytes_per_step"], rel=0.05)
    assert 0.85 < equal["bytes_per_step"] / topk["bytes_per_step"] < 1.02


def test_demo_prints_table_and_progress_without_a_terminal(finished_demo):
    ended, _ = finished_demo
    for label in ("dense allreduce", "top-k allgather", "gTop-k, equal k", "gTop-k, equal bytes"):
        assert ended.stdout.count(label) >= 3  # progress of two seeds, and a row
    assert "Over an emulated link of 50 Mbit/s, 1 ms: gTop-k, equal k reaches" in " ".join(
        ended.stdout.replace("\N{NO-BREAK SPACE}", " ").split()
    )
    assert "+ copy" in ended.stdout
    assert "Replicas bit-identical after every run: yes" in ended.stdout
    assert "@progress" not in ended.stdout
    assert max(map(len, ended.stdout.split("Measured on")[1].splitlines()[:9])) <= 80


def test_demo_writes_a_page(finished_demo):
    _, folder = finished_demo
    page = (folder / "report" / "index.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") >= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "45"], "--ranks must be at most 44, got 45: a step takes 32 images per rank"),
        (["--ranks", "44", "--epochs", "1"], "--epochs must be at least 2 with 44 ranks, got 1"),
        (["--out", "/dev/null/x"], "--out must be a folder that can be written to, got '/dev"),
    ],
)
def test_invalid_arguments_print_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *arguments]) == 2
    ended = capsys.readouterr()
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1
    assert ended.out == ""
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--density 0", "--density: must lie in (0, 1], got '0'"),
        ("--ranks 0", "--ranks: must be a whole number, at least 1, got '0'"),
        ("--seeds 0", "--seeds: must be a whole number, at least 1, got '0'"),
    ],
)
def test_values_out_of_range_exit_with_the_reason(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *words.split()])
    assert message in capsys.readouterr().err


def test_out_below_a_file_prints_one_line_before_ranks_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("mine")
    for out in ("afile", "afile/x"):
        assert main(["demo", "--out", out]) == 2
        ended = capsys.readouterr()
        (line,) = ended.err.splitlines()
        assert line.startswith("gtopk demo: --out must be a folder that can be written to, got")
        assert f"'{out}'" in line
        assert ended.out == ""
    assert (tmp_path / "afile").read_text() == "mine"


def test_plan_image_counts_match_the_data_set():
    from sklearn.datasets import load_digits

    assert len(load_digits().target) == TRAIN_IMAGES + TEST_IMAGES
    assert [Plan(ranks=ranks).steps_per_epoch() for ranks in (44, 45)] == [1, 0]


@pytest.mark.parametrize("growth", [1.0, 2.0])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8])
def test_equal_bytes_density_makes_gtopk_send_as_much_as_topk(threads, ranks, growth):
    """Compare counted bytes of a reduction with each, summed over ranks, without headers."""
    import numpy as np

    from collectives import reduce, select
    from collectives.wire import HEADER_BYTES

    length, density = 100_000, 0.01

    def sent(algorithm: str, k: int, **options) -> int:
        def program(transport) -> int:
            values = np.random.default_rng(transport.rank).standard_normal(length)
            picked, _ = select(values.astype(np.float32), k)
            reduce(picked, k, transport, algorithm, **options)
            return transport.traffic.sent_bytes - transport.traffic.sent_messages * HEADER_BYTES

        return sum(threads(ranks, program))

    k = round(density * length)
    equal = round(equal_bytes_density(density, ranks, growth) * length)
    assert sent("gtopk", equal, growth=growth) == pytest.approx(sent("topk-allgather", k), rel=0.02)
