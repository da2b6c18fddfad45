"""The comparison of recipes: pairing by seed, its table, and its options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpi_scripts.convergence import RECIPES, Setting, main, train
from mpi_scripts.tasks import TASKS


def test_convergence_rows_are_paired_by_seed_and_dense_runs_once(tmp_path: Path, capsys) -> None:
    file = tmp_path / "runs.json"
    words = ["--seeds", "2", "--epochs", "1", "--densities", "0.02", "0.1", "--json", str(file)]
    words += ["--losses", "2.4", "0.0001"]
    assert main([*words, "--recipes", "dense", "gtopk"]) == 0
    results = json.loads(file.read_text())["results"]
    assert [(each["recipe"], each["density"]) for each in results] == [
        ("dense", 0.02),
        ("gtopk", 0.02),
        ("gtopk", 0.1),
    ]
    rows = capsys.readouterr().out.splitlines()[2:]
    dense, sparse = results[:2]
    means = [
        sum(run["accuracy"] for run in each["runs"]) / len(each["runs"]) for each in (dense, sparse)
    ]
    assert f"{means[1] - means[0]:+.2f} ± " in rows[1]
    assert " | 0 (0-0) | not all seeds |" in rows[0]
    assert sparse["runs"][0]["sent_bytes"] < dense["runs"][0]["sent_bytes"] / 10


@pytest.mark.matrix
def test_first_seed_shifts_the_seeds_of_all_runs(tmp_path: Path) -> None:
    def trained(*words: str) -> list[float]:
        file = tmp_path / "runs.json"
        main(["--epochs", "1", "--json", str(file), "--recipes", "dense", *words])
        (dense,) = json.loads(file.read_text())["results"]
        return [run["losses"][-1] for run in dense["runs"]]

    first, second, third = trained("--seeds", "3")
    assert trained("--seeds", "2", "--first-seed", "1") == [second, third]
    assert len({first, second, third}) == 3


def test_adam_recipes_are_compared_with_adamw(tmp_path: Path, capsys) -> None:
    file = tmp_path / "runs.json"
    words = ["--seeds", "2", "--epochs", "1", "--json", str(file)]
    names = ["dense", "AdamW", "AdamW, gtopk", "Adam before, gtopk"]
    assert main([*words, "--recipes", *names]) == 0
    results = json.loads(file.read_text())["results"]
    rows = capsys.readouterr().out.splitlines()[2:]
    _, adam, *sparse = [sum(run["accuracy"] for run in each["runs"]) / 2 for each in results]
    assert rows[1].endswith(" |  |")
    for accuracy, row in zip(sparse, rows[2:], strict=True):
        assert f"| {accuracy - adam:+.2f} ± " in row


@pytest.mark.matrix
def test_sgd_recipes_are_compared_with_the_first_dense_recipe(tmp_path: Path, capsys) -> None:
    file = tmp_path / "runs.json"
    names = ["dense", "dense, no momentum", "topk"]
    words = ["--seeds", "2", "--epochs", "1", "--json", str(file)]
    assert main([*words, "--recipes", *names]) == 0
    results = json.loads(file.read_text())["results"]
    dense, *others = [sum(run["accuracy"] for run in each["runs"]) / 2 for each in results]
    rows = capsys.readouterr().out.splitlines()[3:]
    for accuracy, row in zip(others, rows, strict=True):
        assert f"| {accuracy - dense:+.2f} ± " in row


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_on_an_odd_number_of_ranks(name: str) -> None:
    task = TASKS["digits"](0, 1)
    setting = Setting(ranks=3, density=0.05, length=85_002, steps=task.steps)
    assert 5 < train(task, RECIPES[name](setting), ranks=3).accuracy <= 100


def test_convergence_needs_at_least_two_seeds(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--seeds", "1"])
    assert "--seeds must be at least 2" in capsys.readouterr().err
