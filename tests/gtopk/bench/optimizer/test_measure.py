"""The benchmark of a step: every way is measured beside the plain one, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.bench.optimizer.command import main, table
from gtopk.bench.optimizer.measure import PLAIN, measure, ways
from gtopk.bench.optimizer.networks import resnet18, resnet20
from gtopk.world import world


def small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))


def test_networks_have_the_sizes_of_their_names():
    elements = [sum(p.numel() for p in make().parameters()) for make in (resnet20, resnet18)]
    assert elements == [272_474, 11_173_962]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_is_measured_beside_the_plain_one(threads, ranks):
    def program(transport: LocalTransport):
        with world.entered(transport):
            return measure(small, ways(0.05, ranks), batch=2, rounds=4, rank=transport.rank)

    for records in threads(ranks, program):
        assert [each.name for each in records[:3]] == [PLAIN, "dense", "gtopk"]
        assert len(records) == (3 if ranks == 1 else 6)
        plain, *others = records
        assert (plain.over_plain, plain.hidden_share, plain.buckets) == (0.0, None, 0)
        for each in others:
            assert each.working_seconds > 0
            assert 0.0 <= each.hidden_share <= 1.0
        assert table(records).count("\n") == len(records)


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys):
    file = tmp_path / "records.json"
    assert main(["--batch", "1", "--rounds", "1", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert (content["model"], content["ranks"]) == ("resnet20", 1)
    assert len(content["records"]) == 3
    assert "over plain" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--batch", "0"], ["--rounds", "-1"]])
def test_wrong_arguments_are_refused(wrong, capsys):
    assert main(wrong) == 2
    assert wrong[0] in capsys.readouterr().err
