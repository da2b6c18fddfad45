"""The training loop: resuming, accumulated passes, half precision, logs and arguments."""

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
                with one_at_a_time:  # threads share torch's random generator
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


def test_run_resumed_from_checkpoint_is_bit_identical(trained, tmp_path: Path, monkeypatch) -> None:
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
        uninterrupted = trained(2, *given)
        steps = uninterrupted[0]["steps"]
        assert isinstance(steps, int)
        assert [record["epoch"] for record in uninterrupted] == [1, 2]
        kept = [*given, "--checkpoint", str(tmp_path / preset), "--checkpoint-every", "3"]
        (begun,) = trained(2, *kept, "--steps", "3")
        assert (begun["epoch"], begun["steps"]) == (1, 3)
        resumed = trained(2, *kept)
        # A restart sends more bytes, as ranks exchange the operations' names again.
        assert [without(record, *NOT_TRAINING) for record in resumed] == [
            without(record, *NOT_TRAINING) for record in uninterrupted
        ]
        assert list((tmp_path / preset).iterdir())


def test_run_resumes_on_another_number_of_ranks(trained, tmp_path: Path) -> None:
    kept = ["--epochs", "2", "--batch-size", "50", "--checkpoint", str(tmp_path / "kept")]
    assert [record["epoch"] for record in trained(2, *kept, "--epochs", "1")] == [1]
    (second,) = trained(3, *kept)
    assert (second["epoch"], second["ranks"]) == (2, 3)
    assert second["accuracy"] > 0.3  # chance: 0.1


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_epoch_loss_is_the_mean_over_steps_when_ranks_change(
    trained, tmp_path: Path, before: int, after: int
) -> None:
    """With a learning rate near zero every step has about the loss of the first weights."""
    still = ["--compression", "none", "--lr", "1e-9", "--epochs", "1", "--batch-size", "40"]
    (uninterrupted,) = trained(after, *still)
    (other,) = trained(before, *still)
    kept = [*still, "--checkpoint", str(tmp_path / "kept")]
    trained(before, *kept, "--steps", "10")
    (resumed,) = trained(after, *kept)
    assert resumed["loss"] == pytest.approx(uninterrupted["loss"], rel=0.05)
    assert (
        resumed["steps"]
        == 10 + uninterrupted["steps"] - 10 * uninterrupted["steps"] // other["steps"]
    )


def test_diverged_loss_is_logged_as_null(trained, tmp_path: Path) -> None:
    diverging = ["--compression", "none", "--lr", "1e30", "--epochs", "1", "--batch-size", "100"]
    (record,) = trained(1, *diverging)
    assert record["loss"] is None


def test_checkpoint_is_saved_before_the_epoch_is_logged(
    trained, tmp_path: Path, monkeypatch
) -> None:
    def fails(*of: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("mpi_scripts.training.loop._report", fails)
    kept = tmp_path / "kept"
    with pytest.raises(OSError, match="No space left"):
        trained(1, "--epochs", "1", "--batch-size", "100", "--checkpoint", str(kept))
    assert len(list(kept.iterdir())) == 1


def test_finished_training_reports_that_no_step_is_left(
    monkeypatch, tmp_path: Path, capsys
) -> None:
    done = ["train.py", "--epochs", "1", "--batch-size", "200", "--checkpoint", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", done)
    for message in ("epoch   1  loss", "step 7 of 7: nothing is left to train"):
        with world.entered(local_world(1)[0]):
            train.train(train.prepare(train.parse()))
        assert message in capsys.readouterr().out


def test_two_accumulated_passes_equal_one_batch_of_twice_the_size(trained) -> None:
    dense = ["--compression", "none", "--epochs", "1"]
    (two,) = trained(2, *dense, "--batch-size", "20", "--passes", "2")
    (one,) = trained(2, *dense, "--batch-size", "40")
    assert two["steps"] == one["steps"]
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.01)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)


def test_training_learns_with_amp_and_with_density_warmup(trained) -> None:
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


def test_fp16_on_cpu_is_refused_where_torch_scales_losses_only_on_gpus(
    trained, monkeypatch
) -> None:
    """Such are torch 2.1 and 2.2."""
    monkeypatch.delattr(torch.amp, "GradScaler")
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda: "of GPUs")
    assert loss_scaler("fp16", torch.device("cuda", 1)) == "of GPUs"
    assert loss_scaler("bf16", torch.device("cpu")) is None
    with pytest.raises(ValueError, match=r"fp16 on the CPU needs torch 2\.3 .*: use --amp bf16"):
        trained(1, "--amp", "fp16")


def test_log_has_a_density_only_for_sparse_compressions(trained) -> None:
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
def test_gpt_preset_takes_adam_steps_before_selection_unless_switched_off(
    monkeypatch, arguments, steps, lr
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--preset", "gpt-docstrings", *arguments])
    with world.entered(local_world(1)[0]):
        training = train.prepare(train.parse())
    (group,) = training.optimizer.param_groups
    assert isinstance(training.optimizer, torch.optim.AdamW)
    assert training.adam_steps == steps
    assert (group["lr"], group["weight_decay"]) == (lr, 0.1)


def test_momentum_correction_scales_weight_decay_to_the_same_effect(monkeypatch) -> None:
    groups = []
    for switch in ("--no-momentum-correction", "--momentum-correction"):
        given = ["--preset", "digits", "--weight-decay", "0.001", "--momentum", "0.5", switch]
        monkeypatch.setattr(sys, "argv", ["train.py", *given])
        with world.entered(local_world(1)[0]):
            (group,) = train.prepare(train.parse()).optimizer.param_groups
        groups.append((group["momentum"], group["weight_decay"]))
    assert groups == [(0.5, 0.001), (0.0, 0.002)]


def test_arguments_without_effect_are_refused(trained) -> None:
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
