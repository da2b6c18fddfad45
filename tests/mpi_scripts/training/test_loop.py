"""The loop: what is resumed is what was broken off, passes add up, half precision trains."""

from __future__ import annotations

import json
import re
import sys
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.runtime.world import world
from models.lstm_ptb import LstmLanguageModel
from mpi_scripts import train
from mpi_scripts.training.loop import loss_scaler
from mpi_scripts.training.presets import PRESETS

NOT_TRAINING = ("sent_bytes", "seconds")
SENDING = (["--density", "0.1"], ["--density-warmup-epochs", "1"], ["--momentum-correction"])


@pytest.fixture
def trained(monkeypatch, tmp_path, capsys):
    """Run train.py on threads; return what rank 0 logs of each epoch."""
    one_at_a_time = threading.Lock()

    def run(ranks: int, *arguments: str) -> list[dict[str, object]]:
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments, "--log-file", str(log)])

        def rank(transport: LocalTransport) -> None:
            with world.entered(transport):
                with one_at_a_time:  # torch's generator is of all threads
                    training = train.prepare(train.parse())
                train.train(training)

        run_ranks(local_world(ranks), rank)
        capsys.readouterr()
        return [
            json.loads(line, parse_constant=pytest.fail) for line in log.read_text().splitlines()
        ]

    return run


def without(record: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in record.items() if name not in names}


def test_a_run_that_was_broken_off_goes_on_to_the_bit(trained, tmp_path: Path, monkeypatch) -> None:
    narrow = replace(
        PRESETS["lstm-ptb"],
        model=lambda sizes: LstmLanguageModel(sizes.outputs, width=4, dropout=0.0),
        epochs=2,
    )
    monkeypatch.setitem(PRESETS, "lstm-ptb", narrow)
    for preset, options in (
        ("digits", ["--epochs", "2", "--batch-size", "140"]),
        ("lstm-ptb", ["--synthetic-samples", "600", "--batch-size", "2"]),
    ):
        given = ["--preset", preset, *options]
        whole = trained(2, *given)
        steps = whole[0]["steps"]
        assert isinstance(steps, int)
        assert [record["epoch"] for record in whole] == [1, 2]
        kept = [*given, "--checkpoint", str(tmp_path / preset), "--checkpoint-every", "3"]
        (begun,) = trained(2, *kept, "--steps", "3")
        assert (begun["epoch"], begun["steps"]) == (1, 3)
        resumed = trained(2, *kept)
        # A start costs some bytes: names are told anew.
        assert [without(record, *NOT_TRAINING) for record in resumed] == [
            without(record, *NOT_TRAINING) for record in whole
        ]
        assert list((tmp_path / preset).iterdir())


def test_a_run_goes_on_on_another_number_of_ranks(trained, tmp_path: Path) -> None:
    kept = ["--epochs", "2", "--batch-size", "50", "--checkpoint", str(tmp_path / "kept")]
    assert [record["epoch"] for record in trained(2, *kept, "--epochs", "1")] == [1]
    (second,) = trained(3, *kept)
    assert (second["epoch"], second["ranks"]) == (2, 3)
    assert second["accuracy"] > 0.3  # chance: 0.1


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_the_loss_of_an_epoch_on_changing_ranks_is_the_mean_of_its_steps(
    trained, tmp_path: Path, before: int, after: int
) -> None:
    """With a rate of next to nothing every step has about the loss of the first weights."""
    still = ["--compression", "none", "--lr", "1e-9", "--epochs", "1", "--batch-size", "40"]
    (whole,) = trained(after, *still)
    (other,) = trained(before, *still)
    kept = [*still, "--checkpoint", str(tmp_path / "kept")]
    trained(before, *kept, "--steps", "10")
    (resumed,) = trained(after, *kept)
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=0.05)
    assert resumed["steps"] == 10 + whole["steps"] - 10 * whole["steps"] // other["steps"]


def test_a_training_that_diverges_is_logged_in_what_json_knows(trained, tmp_path: Path) -> None:
    diverging = ["--compression", "none", "--lr", "1e30", "--epochs", "1", "--batch-size", "100"]
    (record,) = trained(1, *diverging)
    assert record["loss"] is None


def test_an_epoch_is_saved_before_its_figures_are_written(
    trained, tmp_path: Path, monkeypatch
) -> None:
    def fails(*of: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("mpi_scripts.training.loop._report", fails)
    kept = tmp_path / "kept"
    with pytest.raises(OSError, match="No space left"):
        trained(1, "--epochs", "1", "--batch-size", "100", "--checkpoint", str(kept))
    assert len(list(kept.iterdir())) == 1


def test_a_training_that_is_done_says_so(monkeypatch, tmp_path: Path, capsys) -> None:
    done = ["train.py", "--epochs", "1", "--batch-size", "200", "--checkpoint", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", done)
    for told in ("epoch   1  loss", "step 7 of 7: nothing is left to train"):
        with world.entered(local_world(1)[0]):
            train.train(train.prepare(train.parse()))
        assert told in capsys.readouterr().out


def test_two_passes_of_a_batch_are_one_of_twice_as_many(trained) -> None:
    dense = ["--compression", "none", "--epochs", "1"]
    (two,) = trained(2, *dense, "--batch-size", "20", "--passes", "2")
    (one,) = trained(2, *dense, "--batch-size", "40")
    assert two["steps"] == one["steps"]
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.01)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)


def test_half_precision_and_a_warm_up_of_the_density_train(trained) -> None:
    for arguments in (
        ["--amp", "bf16"],
        ["--amp", "fp16"],
        ["--compression", "oktopk"],
        ["--compression", "gtopk", "--density-warmup-epochs", "0.5"],
        ["--compression", "gtopk", "--growth", "1"],
        ["--compression", "published", "--density-warmup-epochs", "0.5"],
    ):
        (record,) = trained(2, "--epochs", "1", "--batch-size", "25", *arguments)
        assert record["accuracy"] > 0.4, arguments  # chance: 0.1
        assert record["skipped_steps"] == 0 or "fp16" in arguments


def test_a_torch_that_scales_for_gpus_only_does_so_there_and_says_so_elsewhere(
    trained, monkeypatch
) -> None:
    """As torch 2.1 and 2.2."""
    monkeypatch.delattr(torch.amp, "GradScaler")
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda: "of GPUs")
    assert loss_scaler("fp16", torch.device("cuda", 1)) == "of GPUs"
    assert loss_scaler("bf16", torch.device("cpu")) is None
    with pytest.raises(ValueError, match=r"fp16 on the CPU needs torch 2\.3 .*: use --amp bf16"):
        trained(1, "--amp", "fp16")


def test_the_log_has_a_density_only_where_one_is_used(trained) -> None:
    quick = ["--steps", "1", "--batch-size", "20"]
    for compression, density in (("gtopk", 0.01), ("auto", 0.01), ("none", None), ("bf16", None)):
        (record,) = trained(2, *quick, "--compression", compression)  # the preset's own options
        assert record["density"] == density
    (record,) = trained(2, *quick, "--compression", "topk", "--density", "0.2")
    assert record["density"] == 0.2


@pytest.mark.parametrize(
    ("arguments", "steps", "lr"),
    [
        ([], "before", 1e-3),
        (["--lr", "0.01"], "before", 0.01),
        (["--no-momentum-correction"], "after", 1e-3),
    ],
)
def test_adamws_steps_are_before_the_selection_where_there_is_one(
    monkeypatch, arguments, steps, lr
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--preset", "gpt-docstrings", *arguments])
    with world.entered(local_world(1)[0]):
        training = train.prepare(train.parse())
    (group,) = training.optimizer.param_groups
    assert isinstance(training.optimizer, torch.optim.AdamW)
    assert training.adam_steps == steps
    assert (group["lr"], group["weight_decay"]) == (lr, 0.1)


def test_weight_decay_does_the_same_without_the_momentum_it_went_through(monkeypatch) -> None:
    groups = []
    for switch in ("--no-momentum-correction", "--momentum-correction"):
        given = ["--preset", "digits", "--weight-decay", "0.001", "--momentum", "0.5", switch]
        monkeypatch.setattr(sys, "argv", ["train.py", *given])
        with world.entered(local_world(1)[0]):
            (group,) = train.prepare(train.parse()).optimizer.param_groups
        groups.append((group["momentum"], group["weight_decay"]))
    assert groups == [(0.5, 0.001), (0.0, 0.002)]


def test_arguments_that_would_go_unheard_are_refused(trained) -> None:
    for arguments, reason in (
        (["--data", "folder"], "--preset digits takes --dataset"),
        (["--preset", "cnn-digits", "--dataset", "digits"], "give cnn-digits --data FOLDER"),
        (
            ["--preset", "vgg16-cifar10", "--data", "x", "--synthetic-samples", "9"],
            "give --data FOLDER or --synthetic-samples N, not both",
        ),
        (["--preset", "resnet20-cifar10", "--data", "nowhere"], "no CIFAR-10 in 'nowhere'"),
        (["--passes", "99"], "--passes 99 must not exceed the 22 batches that each rank has"),
        (["--device", "cuda"], "needs a GPU that torch can use"),
        (["--preset", "gpt-docstrings", "--momentum", "0.9"], "--momentum is for SGD; gpt-"),
        (
            ["--preset", "lstm-ptb", "--momentum-correction"],
            "--momentum-correction needs momentum, but lstm-ptb has none",
        ),
        (
            ["--preset", "cnn-digits", "--synthetic-samples", "64"],
            "--synthetic-samples: cnn-digits always trains on real data",
        ),
        (["--preset", "lstm-ptb", "--workers", "8"], "--workers: lstm-ptb reads one text in order"),
        (
            ["--density", "0.5", "--density-warmup-epochs", "3"],
            "--density-warmup-epochs starts at 0.25: the density must be lower",
        ),
        (["--density-warmup-epochs", "inf"], "--density-warmup-epochs: must lie in [0, inf)"),
        (
            ["--log-file", "/proc/nothing/log"],
            "--log-file: /proc/nothing/log cannot be written",
        ),
        (["--compression", "topk", "--growth", "1"], "--growth is for gtopk and hierarchical, got"),
        (["--checkpoint-every", "3"], "--checkpoint-every needs --checkpoint FOLDER"),
        *(
            (["--compression", kind, *option], f"--compression {kind} does not use {option[0]}:")
            for kind, option in [*product(train.DENSE, SENDING), ("auto", SENDING[1])]
        ),
        (
            ["--compression", "none", *(word for option in SENDING for word in option)],
            "none does not use --density, --density-warmup-epochs, --momentum-correction: leave it "
            "out, or choose one of topk, gtopk, oktopk, hierarchical",
        ),
        (
            ["--preset", "lstm-ptb", "--synthetic-samples", "90"],
            "--batch-size 20 on 2 ranks leaves 2 words a lane, less than a window of 35",
        ),
    ):
        with pytest.raises((OSError, ValueError), match=re.escape(reason)):
            trained(2, *arguments)
