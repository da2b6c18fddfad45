"""The training loop: epochs of steps, with a line of figures after each epoch, and checkpoints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch

import gtopk
import gtopk.torch as hvd

from .schedules import Progress, Schedule
from .task import Task, moved

AMP_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Training:
    """The inputs of a training, prepared on a rank before the ranks communicate.

    passes:     backward passes per step, whose gradients are averaged.
    steps:      number of steps to train; None: until the epochs end.
    adam_steps: whether Adam's steps are made before the exchange, or after it.
    amp:        "bf16" or "fp16" for autocast; None: float32 throughout.
    scaler:     GradScaler of the loss; None: the loss is not scaled.
    checkpoint: the folder for checkpoints, saved after each epoch, and every `checkpoint_every`
                steps if that is above 0.
    log:        a file for one line of JSON per epoch.
    facts:      a description of the run, for the log.
    """

    task: Task[Any]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    compression: Any
    schedule: Schedule
    device: torch.device
    epochs: int
    passes: int = 1
    steps: int | None = None
    adam_steps: Literal["before", "after"] = "before"
    clip_norm: float | None = None
    amp: str | None = None
    scaler: Any = None
    checkpoint: Path | None = None
    checkpoint_every: int = 0
    log: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def steps_per_epoch(self) -> int:
        return self.task.batches_per_epoch // self.passes


@dataclass
class Tally:
    """This rank's progress, and the epoch's cost and loss; saved in checkpoints."""

    epoch: int = 0
    step: int = 0  # in the epoch
    steps_per_epoch: int = 0
    made: int = 0  # steps made in the epoch; differs from `step` if the number of ranks changed
    loss_sum: float = 0.0  # over the steps made
    sent_bytes: int = 0  # since training began
    counted: bool = True  # False for MPI's own allreduce, whose bytes can only be estimated
    seconds: float = 0.0  # of the steps made

    def rescale(self, steps_per_epoch: int) -> None:
        """Convert the position in the epoch to an epoch of this many steps."""
        if self.steps_per_epoch and self.steps_per_epoch != steps_per_epoch:
            self.step = self.step * steps_per_epoch // self.steps_per_epoch
        self.steps_per_epoch = steps_per_epoch

    def next_epoch(self) -> Tally:
        return replace(self, epoch=self.epoch + 1, step=0, made=0, loss_sum=0.0, seconds=0.0)


def loss_scaler(amp: str | None, device: torch.device) -> Any:
    """Return the GradScaler that fp16 gradients need; None for other gradients.

    Raises ValueError if this torch has none for the CPU.
    """
    if amp != "fp16":
        return None
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler(device.type)
    if device.type != "cuda":
        raise ValueError(
            f"--amp fp16 on the CPU needs torch 2.3 or newer, got {torch.__version__}: "
            "use --amp bf16, or a GPU"
        )
    return torch.cuda.amp.GradScaler()  # torch 2.1 and 2.2 have this one only


def train(training: Training) -> None:
    """Train; rank 0 prints. All ranks call it with the same arguments but their own data."""
    task, model = training.task, training.model
    base_rates = [group["lr"] for group in training.optimizer.param_groups]
    clips_before = getattr(training.compression, "corrects", False)
    optimizer = hvd.DistributedOptimizer(
        training.optimizer,
        named_parameters=model.named_parameters(),
        compression=training.compression,
        backward_passes_per_step=training.passes,
        scaler=training.scaler,
        local_clip_norm=training.clip_norm if clips_before else None,
        global_clip_norm=None if clips_before else training.clip_norm,
        adam_steps=training.adam_steps,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    tally = _begin(training, optimizer)
    done = tally.epoch * tally.steps_per_epoch + tally.step
    last = training.epochs * tally.steps_per_epoch
    last = last if training.steps is None else min(last, training.steps)
    if done >= last and hvd.rank() == 0:
        print(f"step {done} of {last}: nothing is left to train", flush=True)
    while done < last:
        batches = task.batches(tally.epoch, tally.step * training.passes)
        model.train()
        while tally.step < tally.steps_per_epoch and done < last:
            begun = time.perf_counter()
            at = Progress(
                tally.epoch + tally.step / tally.steps_per_epoch, training.epochs, hvd.size()
            )
            for group, rate in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = rate * training.schedule(at)
            tally.loss_sum += _step(training, optimizer, batches)
            tally.step, tally.made, done = tally.step + 1, tally.made + 1, done + 1
            assert optimizer.last_step is not None
            tally.sent_bytes += optimizer.last_step.sent_bytes
            tally.counted &= optimizer.last_step.bytes_counted
            tally.seconds += time.perf_counter() - begun
            every = training.checkpoint_every
            if every and done % every == 0 and done < last:
                _save(training, optimizer, tally, done)
        _average_statistics(model)
        ended = tally
        if tally.step == tally.steps_per_epoch:
            tally = tally.next_epoch()
        _save(training, optimizer, tally, done)  # before anything that may fail
        _report(training, optimizer, ended)


def _step(training: Training, optimizer: Any, batches: Iterator[Any]) -> float:
    """Step once; return the loss."""
    scaler = training.scaler
    optimizer.zero_grad()
    total = torch.zeros((), device=training.device)
    for _ in range(training.passes):
        batch = moved(next(batches), training.device)
        with _autocast(training):
            loss = training.task.loss(training.model, batch) / training.passes
        (loss if scaler is None else scaler.scale(loss)).backward()
        total += loss.detach()
    if scaler is None:
        optimizer.step()
    else:
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return float(total)


def _autocast(training: Training) -> AbstractContextManager[Any]:
    if training.amp is None:
        return nullcontext()
    return torch.autocast(training.device.type, AMP_DTYPES[training.amp])


def _begin(training: Training, optimizer: Any) -> Tally:
    """Return the tally at which the run begins, or resumes from a checkpoint."""
    tally, found = Tally(), None
    if training.checkpoint is not None:
        found = gtopk.load_latest(
            training.checkpoint,
            training.model,
            optimizer,
            task=training.task,
            tally={},
            **({"scaler": training.scaler} if training.scaler else {}),
        )
    if found is not None:
        tally = Tally(**found.values["tally"])
        if found.ranks != hvd.size():
            training.task.load_state_dict({})  # the state belongs to another rank
    tally.rescale(training.steps_per_epoch)
    return tally


def _save(training: Training, optimizer: Any, tally: Tally, done: int) -> None:
    if training.checkpoint is not None:
        gtopk.save_checkpoint(
            training.checkpoint,
            training.model,
            optimizer,
            step=done,
            task=training.task,
            tally=vars(tally),
            **({"scaler": training.scaler} if training.scaler else {}),
        )


@torch.no_grad()
def _report(training: Training, optimizer: Any, tally: Tally) -> None:
    """Evaluate on all ranks, and let rank 0 print the figures."""
    training.model.eval()
    with _autocast(training):
        counts = training.task.count(training.model, training.device)
    totals = hvd.allreduce(torch.tensor(counts, dtype=torch.float64), op=hvd.Sum, name="counts")
    loss = hvd.allreduce(torch.tensor(tally.loss_sum / max(tally.made, 1)), name="loss")
    if hvd.rank() != 0:
        return
    scores, label = training.task.scores(totals.tolist()), training.task.label
    results = "  ".join(f"test {name} {score:.4f}" for name, score in scores.items())
    megabytes = tally.sent_bytes / 1e6
    print(
        f"epoch {tally.epoch + 1:3d}  loss {float(loss):.4f}  {results}{label}  "
        f"sent per rank{'' if tally.counted else ', estimated,'} {megabytes:.2f} MB\n",
        end="",
        flush=True,
    )
    if training.log is not None:
        record = {
            **training.facts,
            "data": training.task.origin,
            "epoch": tally.epoch + 1,
            "steps": tally.made,
            "loss": _or_null(float(loss)),
            **{name: _or_null(score) for name, score in scores.items()},
            "sent_bytes": tally.sent_bytes,
            "bytes_counted": tally.counted,
            "skipped_steps": optimizer.skipped_steps,
            "seconds": tally.seconds,
        }
        with training.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")


def _or_null(value: float) -> float | None:
    """Return the number, or None (null) for one that JSON cannot represent."""
    return value if math.isfinite(value) else None


@torch.no_grad()
def _average_statistics(model: torch.nn.Module) -> None:
    """Average the running means and variances of batch norm over the ranks."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            hvd.allreduce_(buffer, name=f"statistics.{name}")
