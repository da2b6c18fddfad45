"""`python -m mpi_scripts.scaling` on real ranks, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mpi_scripts.scaling.__main__ import main
from mpi_scripts.scaling.contenders import CONTENDERS


@pytest.mark.matrix
def test_every_contender_is_measured_on_real_ranks(mpirun: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = ["--model", "resnet20", "--compute", "real", "--batch", "1", "--rounds", "1"]
    job = mpirun(2, "bench_scaling.py", *arguments, "--interface", "lo", "--json", str(file))
    assert job.returncode == 0, job.stdout + job.stderr
    results = json.loads(file.read_text())
    assert (results["ranks"], results["hosts"], results["transport"]) == (2, 1, "mpi")
    assert [record["contender"] for record in results["records"]] == list(CONTENDERS)
    alone, *others = results["records"]
    assert (alone["rounds"], alone["efficiency"]) == (2, 1.0)  # before and after the others
    for record in others:
        assert record["seconds"]["median"] > 0
        assert record["efficiency"] == pytest.approx(
            alone["seconds"]["median"] / record["seconds"]["median"]
        )
    assert "gtopk-tree" in job.stdout


@pytest.mark.matrix
def test_torchrun_measures_ssgd_and_ddp_over_gloo(torchrun: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = ["--model", "resnet20", "--compute", "real", "--batch", "1", "--rounds", "1"]
    arguments += ["--contenders", "ssgd", "ddp", "--json", str(file)]
    job = torchrun(2, "bench_scaling.py", *arguments)
    assert job.returncode == 0, job.stdout + job.stderr
    results = json.loads(file.read_text())
    assert results["transport"] == "torch.distributed"
    assert [record["contender"] for record in results["records"]] == ["alone", "ssgd", "ddp"]


def test_help_names_each_model_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    (models,) = re.findall(r"\[--model \{([^}]*)\}\]", capsys.readouterr().out)
    named = models.split(",")
    assert sorted(set(named)) == sorted(named)
    assert {"vgg16", "resnet20", "resnet18"} < set(named)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compute", "real", "--model", "vgg16"], "--compute real supports resnet20, resnet18"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--shared-cores", "0"], "--shared-cores must be at least 1"),
        (["--markdown", "/nowhere.json"], "No such file"),
    ],
)
def test_scaling_refuses_options_that_cannot_be_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
