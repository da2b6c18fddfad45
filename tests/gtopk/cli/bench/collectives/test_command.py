"""`gtopk bench collectives` measures on threads and under mpirun, and reports wrong usage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives import ALGORITHMS
from gtopk.cli.bench.collectives import main, parser
from gtopk.cli.bench.collectives.cases import Case, Results
from mpi_scripts.predictions import read
from tests.matrix import some_of


def test_every_contender_is_measured_in_every_case(results: Results) -> None:
    cases: dict[tuple[int, float], set[str]] = {}
    for record in results["records"]:
        if record["selective"]:
            cases.setdefault((record["ranks"], record["density"]), set()).add(record["contender"])
    assert set(cases) == {(2, 0.01), (2, 0.1), (3, 0.01), (3, 0.1)}
    assert len(set(map(frozenset, cases.values()))) == 1
    algorithms = {record["algorithm"] for record in results["records"] if record["ours"]}
    assert algorithms == {*ALGORITHMS, "shards"}


def test_dense_and_shards_are_measured_once_per_ranks_and_length(results: Results) -> None:
    dense = [record for record in results["records"] if not record["selective"]]
    assert sorted((record["contender"], record["ranks"]) for record in dense) == [
        ("dense", 2),
        ("dense", 3),
        ("dense-library", 2),
        ("dense-library", 3),
        ("shards period=2 bits=2", 2),
        ("shards period=2 bits=2", 3),
    ]


def test_json_file_holds_what_was_measured(json_file: Path, results: Results) -> None:
    assert read(json_file) == results
    for record in results["records"]:
        assert record["rounds"] == len(record["seconds_by_round"]) == 2
        assert record["seconds"]["max"] == max(record["seconds_by_round"])
        model = record["modelled_wire_seconds"]
        if model:
            ratio = record["seconds"]["median"] / model
            assert record["measured_over_modelled"] == pytest.approx(ratio)
    assert results["run"]["link"]["bits_per_second"] == pytest.approx(1e8)
    assert results["run"]["link"]["bandwidth_from"] == "given"


def test_exact_messages_are_counted_to_the_byte(results: Results) -> None:
    for record in results["records"]:
        if record["contender"] == "gtopk raw+bf16" and record["ranks"] == 2:
            assert record["counted"]
            assert record["sent_messages"] == {"mean": 1, "max": 1}
            assert 6 * record["k"] <= record["sent_bytes"]["max"] <= 6 * record["k"] + 128


def test_shards_are_counted_to_the_byte_and_modelled(results: Results) -> None:
    for record in results["records"]:
        if record["algorithm"] == "shards":
            ranks = record["ranks"]
            entries = 1536  # of 3,000, every second block of 256
            assert record["format"] == "whole+int2"
            assert record["updated"] == entries
            assert record["counted"]
            plain = 2 * (ranks - 1) / ranks * entries / 5
            messages = 2 * (ranks - 1)  # each with a header, a scale for 240 values, and a stamp
            assert plain <= record["sent_bytes"]["mean"] <= plain + 100 * messages
            assert record["modelled_wire_seconds"] > 0


@pytest.mark.parametrize("ranks", some_of([2, 3], 3))
def test_benchmark_runs_under_mpirun(
    mpirun: Callable[..., object], tmp_path: Path, ranks: int
) -> None:
    path = tmp_path / "mpi.json"
    words = "--lengths 5000 --densities 0.01 --rounds 2 --formats exact bf16 --picks clustered"
    job = mpirun(ranks, "bench_collectives.py", *words.split(), "--json", str(path))
    assert job.returncode == 0, job.stderr
    assert f"{ranks} ranks, n = 5,000" in job.stdout
    found = read(path)
    assert found["run"]["transport"] == "mpi"
    assert found["run"]["hosts"] == 1
    assert {record["ranks"] for record in found["records"]} == {ranks}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--picks random", "--picks: must be one of uniform, "),
        ("--algorithms gtpok", "--algorithms: an algorithm must be one of "),
        ("--algorithms gtopk:growth", "--algorithms: an option must be written name=value"),
        ("--algorithms gtopk:period=2", "--algorithms: algorithm 'gtopk' has no option 'period'"),
        ("--algorithms shards:growth=2", "--algorithms: shards take period and bits, got growth"),
        ("--algorithms shards:bits=5", "--algorithms: bits must be one of 2, 3, 4, 8, 16, 32"),
        ("--algorithms shards:period=x", "--algorithms: period must be an integer, got 'x'"),
        ("--algorithms gtopk:growth=1e400", "growth must be a number from 1 on, got inf"),
        ("--algorithms gtopk:growth=-1", "growth must be a number from 1 on, got -1"),
        ("--algorithms gtopk:growth=much", "growth must be a number from 1 on, got 'much'"),
        ("--algorithms shards:bits=[]", "bits must be one of 2, 3, 4, 8, 16, 32; got []"),
        ("--bandwidth 1e-320", "--bandwidth: must lie in [1, 1e18], got '1e-320'"),
        ("--latency 1e308", "--latency: must lie in [0, 1e9], got '1e308'"),
        ("--algorithms gtopk oktopk:k_out=5000", "k_out must lie in 1..4096"),
        ("--algorithms oktopk:k_out=9 --lengths 100 8", "k_out must lie in 1..8"),
        ("--algorithms hierarchical:across=mpi", "across must be one of gtopk, oktopk; got 'mpi'"),
        ("--algorithms hierarchical:nodes=2", "--algorithms: hierarchical:nodes=2: "),
        ("--algorithms shards:period=1e400", "period must be an integer, got inf"),
        (f"--lengths {10**15}", "--lengths: must have at most 15 digits, got "),
        ("--algorithms dense,gtopk", "give several with spaces: dense gtopk"),
        ("--formats zip", "--formats: the code of values must be one of "),
        ("--formats exact,bf16", "give several with spaces: exact bf16"),
        ("--baselines dense", "--baselines: must be one of "),
        ("--ranks 2,4,8", "--ranks: must be a whole number, at least 1, got '2,4,8'; give"),
        ("--lengths 0", "--lengths: must be a whole number, at least 1, got '0'"),
        ("--densities 0.1 1.5", "--densities: must lie in (0, 1], got '1.5'"),
        ("--seed -1", "--seed: must be a whole number, at least 0, got '-1'"),
        ("--interface nope0", "--interface: must be one of lo"),
    ],
)
def test_invalid_arguments_exit_with_the_reason(capsys, words: str, message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert message in capsys.readouterr().err


def test_vector_that_does_not_fit_into_memory_ends_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--lengths 999999999999999 --algorithms dense --baselines --ranks 1 --rounds 1"
    assert main(words.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("gtopk bench: not enough memory (Unable to allocate ")
    assert error.endswith("): use shorter vectors\n")


def test_case_of_one_rank_is_shown_in_the_singular() -> None:
    shown = str(Case(1, 1000, 0.01, "uniform"))
    assert shown == "1 rank, n = 1,000, density 0.01 (k = 10), uniform picks"


def test_reading_an_absent_file_raises() -> None:
    with pytest.raises(FileNotFoundError, match=r"/nowhere/there\.json"):
        read(Path("/nowhere/there.json"))


def test_algorithm_options_take_commas_and_baselines_may_be_empty() -> None:
    words = "--algorithms hierarchical:across=gtopk,growth=2.0 dense --baselines --ranks 2 3"
    options = parser().parse_args(words.split())
    assert options.algorithms == ["hierarchical:across=gtopk,growth=2.0", "dense"]
    assert options.baselines == []
    assert options.ranks == [2, 3]


def test_reading_a_file_of_another_program_raises(tmp_path: Path, json_file: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(ValueError, match="must be written by"):
        read(other)
    broken = json.loads(json_file.read_text())
    del broken["records"][0]["seconds"]
    other.write_text(json.dumps(broken))
    with pytest.raises(ValueError, match="lacks seconds"):
        read(other)


@pytest.mark.parametrize(
    ("environ", "over"),
    [
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, None),
        ({"GTOPK_TRANSPORT": "torch.distributed"}, None),
        ({}, "mpi"),
    ],
)
def test_benchmark_joins_like_a_training_script(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], over: str | None
) -> None:
    class JoinedError(Exception):
        pass

    def joined(**options: object) -> None:
        assert options["over"] == over
        raise JoinedError

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("gtopk.cli.bench.harness.join", joined)
    with pytest.raises(JoinedError):
        main(["--transport", over] if over else [])
