"""The step benchmark measures every way against the plain one, on any number of ranks."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from collectives.transports import LocalTransport
from gtopk.cli.bench.harness import SHAPES, resnet18, resnet20, shapes
from gtopk.cli.bench.optimizer import PLAIN, main, measure, table, usual, ways
from gtopk.runtime.world import world


def test_networks_have_the_sizes_of_their_names():
    elements = [sum(p.numel() for p in make().parameters()) for make in (resnet20, resnet18)]
    assert elements == [272_474, 11_173_962]
    of = {name: [math.prod(s) for layer in make() for s in layer] for name, make in SHAPES.items()}
    assert sum(of["resnet50-shapes"]) == 25_557_032
    assert (len(of["gpt2-shapes"]), sum(of["gpt2-shapes"])) == (148, 124_439_808)
    assert (len(of["1000x10"]), sum(of["one-50m"])) == (1000, 50_000_000)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_is_measured_against_the_plain_step(threads, ranks):
    def program(transport: LocalTransport):
        with world.entered(transport):
            compute = shapes("1000x10", transport.rank)
            known = ways(0.05)
            names = [name for name in usual(ranks) if not name.startswith("ddp")]
            return measure(compute, {name: known[name] for name in names}, rounds=2)

    for records in threads(ranks, program):
        assert [each.name for each in records[:3]] == [PLAIN, "none", "gtopk"]
        assert len(records) == (3 if ranks == 1 else 6)
        plain, *others = records
        assert (plain.over_plain, plain.hidden_share, plain.buckets) == (0.0, None, 0)
        for each in others:
            assert each.working_seconds > 0
            assert 0.0 <= each.hidden_share <= 1.0
        assert table(records).count("\n") == len(records)


def test_command_writes_its_measurements(tmp_path: Path, capsys):
    file = tmp_path / "records.json"
    assert main(["--batch", "1", "--rounds", "1", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert (content["model"], content["ranks"]) == ("resnet20", 1)
    assert len(content["records"]) == 3
    assert "over plain" in capsys.readouterr().out


@pytest.mark.matrix
def test_ddp_and_its_hooks_are_measured_under_mpirun(mpirun):
    ways = ["none", "ddp", "ddp-powersgd", "ddp-gtopk"]
    job = mpirun(2, "bench_optimizer.py", "--model", "160x1000", "--rounds", "2", "--ways", *ways)
    assert job.returncode == 0, job.stdout + job.stderr
    rows = [line.split()[0] for line in job.stdout.splitlines() if "%" in line]
    assert rows == [PLAIN, *ways]


@pytest.mark.horovod
def test_horovod_is_measured_if_built(mpirun):
    job = mpirun(
        2, "bench_optimizer.py", "--model", "160x1000", "--rounds", "2", "--ways", "horovod"
    )
    assert job.returncode == 0, job.stdout + job.stderr
    rows = [line.split()[0] for line in job.stdout.splitlines() if "%" in line]
    assert rows == [PLAIN, "horovod"]


def test_ways_that_an_emulated_link_does_not_slow_are_rejected(monkeypatch, capsys):
    monkeypatch.setenv("GTOPK_LINK", "1gbit")
    assert main(["--ways", "none", "ddp", "ddp-gtopk"]) == 2
    error = capsys.readouterr().err
    assert "GTOPK_LINK=1gbit does not slow the messages of ddp: leave them out" in error


@pytest.mark.matrix
def test_default_ways_on_an_emulated_link_are_those_it_slows(mpirun):
    job = mpirun(
        4, "bench_optimizer.py", "--model", "160x1000", "--rounds", "1", GTOPK_LINK="1gbit"
    )
    assert job.returncode == 0, job.stdout + job.stderr
    rows = [line.split()[0] for line in job.stdout.splitlines() if "%" in line]
    assert rows == [way for way in usual(4) if way != "ddp"]
    assert "link: emulated link of 1000 Mbit/s" in job.stdout


def test_batch_that_does_not_fit_into_memory_exits_with_the_reason(capsys):
    assert main(["--batch", "9" * 15, "--ways", "none"]) == 2
    assert not world.is_initialized()
    reason = f"gtopk bench optimizer: --batch {'9' * 15} is too large: "
    assert capsys.readouterr().err.startswith(reason)


def test_horovod_that_is_not_built_exits_with_how_to_build_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "horovod", None)
    assert main(["--ways", "horovod"]) == 2
    assert "make horovod" in capsys.readouterr().err
