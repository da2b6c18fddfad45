"""Run under torchrun on 2 ranks, with a folder: a Lightning Trainer whose DDP uses gTop-k."""

import logging
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from gtopk.lightning import GTopK

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")  # Lightning's advice about workers and loggers
FOLDER = Path(sys.argv[1])


class Net(LightningModule):
    """A small network; `bad` is the step in which rank 1 has a gradient that is not finite."""

    def __init__(self, bad: int | None = None) -> None:
        super().__init__()
        self.bad = bad
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4)
        ).double()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.3, generator=generator)
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        self.seen.append(weights(self))
        loss = self.layers(batch[0]).square().mean()
        is_bad = self.global_rank == 1 and self.global_step == self.bad
        return loss + (float("nan") if is_bad else 0.0) * self.layers[0].bias.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfTwoOptimizers(Net):
    """The same network with an optimizer for each layer."""

    automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], number: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, number))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.layers[n].parameters(), lr=0.1) for n in (0, 2)]


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def fit(
    callbacks: list[Any],
    epochs: int = 1,
    model: Net | None = None,
    path: Any = None,
    **options: Any,
) -> Net:
    """Train on 4 batches an epoch and rank."""
    model = model or Net()
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"strategy": "ddp", **options},
    )
    trainer.fit(model, DataLoader(TensorDataset(x), 8, shuffle=False), ckpt_path=path)
    if path is None:
        trainer.save_checkpoint(FOLDER / f"{len(callbacks)}-{epochs}.ckpt")
    return model


def residuals(callback: GTopK, model: Net) -> torch.Tensor:
    """Return the sum over the ranks of the residual."""
    (held,) = callback.state.state_dict(model)["held"].values()
    mine = torch.cat([held[name]["residual"].reshape(-1) for name, _ in model.named_parameters()])
    return hvd.allreduce(mine, op=hvd.Sum)


# All entries: the same as DDP alone.
dense, all_entries = fit([]), fit([GTopK(density=1.0)])
torch.testing.assert_close(weights(all_entries), weights(dense), rtol=1e-12, atol=1e-12)

# Some entries: replicas are equal, and the loss falls.
callback = GTopK(density=0.1)
model = fit([callback], epochs=2)
mine = weights(model)
assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None]))
assert not torch.equal(mine, weights(dense))
total = residuals(callback, model)
assert bool(total.any())

# A checkpoint has the residuals of all ranks, and a run resumes from it.
saved = torch.load(FOLDER / "1-2.ckpt", weights_only=False)
assert sorted(saved["gtopk"]["held"]) == [0, 1]
resumed = GTopK(density=0.1)
seen: list[torch.Tensor] = []


class Look(GTopK):
    """Looks at the residual when training begins."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.state.progress.steps:
            seen.append(residuals(self, pl_module))


again = fit([Look(density=0.1)], epochs=3, path=FOLDER / "1-2.ckpt")
torch.testing.assert_close(seen[0], total, rtol=1e-12, atol=1e-12)
assert torch.equal(again.seen[0], mine)

# Another fit of a model keeps the previous fit's residual and steps.
callback = Look(density=0.1)
fit([callback], model=model)
total = residuals(callback, model)
fit([callback], model=model)
torch.testing.assert_close(seen[-1], total, rtol=1e-12, atol=1e-12)
assert callback.state.progress.steps == 8

# A fit of another model does not, nor one from a checkpoint without residuals.
fit([callback])
assert callback.state.progress.steps == 4
fit([callback], epochs=2, model=model, path=FOLDER / "0-1.ckpt")
assert callback.state.progress.steps == 4

# A gradient that is not finite on one rank costs one step on all.
callback = GTopK(density=0.1)
model = fit([callback], model=Net(bad=2))
assert callback.state.skipped_steps == 1
assert torch.equal(model.seen[3], model.seen[2])
assert bool(weights(model).isfinite().all())

# Also if several optimizers step, of which a GradScaler skips only the one with a NaN.
for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
    callback = GTopK(density=0.1)
    model = OfTwoOptimizers(bad=4)  # in the third batch: Lightning counts the steps of both
    plugins = [] if scaler is None else [MixedPrecision("16-mixed", "cpu", scaler)]
    small_buckets = DDPStrategy(bucket_cap_mb=1e-4)  # one for each parameter
    fit([callback], model=model, plugins=plugins, strategy=small_buckets)
    assert callback.state.scaler is scaler
    assert callback.state.skipped_steps == 1
    assert torch.equal(model.seen[3], model.seen[2])
    assert bool(weights(model).isfinite().all())


class ByAdamW(Net):
    """The same with AdamW, whose steps are made before the selection."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class OfSomeRate(ByAdamW):
    """The same, with a learning rate that a finder may set before training."""

    lr = 0.01


class FindsAgain(LearningRateFinder):
    """Finds a learning rate within the fit, before the first epoch, as in Lightning's docs."""

    def on_fit_start(self, *call: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0 and not found:
            (hook,) = (each for each in trainer.callbacks if isinstance(each, GTopK))
            found.append((hook.state.progress.steps, residuals(hook, pl_module)))
            self.lr_find(trainer, pl_module)
            found.append((hook.state.progress.steps, residuals(hook, pl_module)))


# Steps of a learning-rate finder are undone in the hook, as Lightning undoes them in the model.
found: list[tuple[int, torch.Tensor]] = []
finder = FindsAgain(num_training_steps=4, early_stop_threshold=None)
callback = GTopK(density=0.1)
fit([callback, finder], model=OfSomeRate(), default_root_dir=FOLDER)
(steps, before), (steps_after, after) = found
assert (steps, steps_after) == (0, 0)
assert torch.equal(before, after)


class Clipped(Callback):
    """Checks the Trainer's clipping when training begins."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        seen_clipping.append(trainer.gradient_clip_val)


seen_clipping: list[Any] = []
callback = GTopK(density=0.1)
model = fit([callback, Clipped()], epochs=2, model=ByAdamW(bad=2), gradient_clip_val=0.5)
assert callback.state.makes_adam_steps
assert (callback.state.global_clip_norm, seen_clipping) == (0.5, [None])
assert callback.state.skipped_steps == 1
mine = weights(model)
assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None]))
assert not torch.equal(mine, weights(fit([GTopK(density=0.1)], epochs=2, model=ByAdamW(bad=2))))
ended = fit([GTopK(density=0.1)], epochs=3, model=ByAdamW(), path=FOLDER / "1-2.ckpt")
assert all(torch.equal(weights(ended), other) for other in hvd.allgather(weights(ended)[None]))
with pytest.raises(ValueError, match="use 'norm'"):
    fit([GTopK()], model=ByAdamW(), gradient_clip_val=0.5, gradient_clip_algorithm="value")

# After a fit the module and a new optimizer train without the callback, although it still lives.
callback = GTopK(density=0.1)
model = fit([callback], model=ByAdamW())
assert callback.state.makes_adam_steps
fit([], model=model)
mine = weights(model)
assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None]))


class Accumulates(ByAdamW):
    """Steps after every second batch, by manual optimization."""

    automatic_optimization = False

    def __init__(self, syncs: bool) -> None:
        super().__init__()
        self.syncs = syncs

    def training_step(self, batch: list[torch.Tensor], number: int) -> None:
        is_last = number % 2 == 1
        with nullcontext() if is_last or self.syncs else self.trainer.model.no_sync():
            self.manual_backward(super().training_step(batch, number))
        if is_last:
            self.optimizers().step()
            self.optimizers().zero_grad()


with pytest.raises(RuntimeError, match=r"`with self\.trainer\.model\.no_sync\(\):`"):
    fit([GTopK(density=0.1)], model=Accumulates(syncs=True))
callback = GTopK(density=0.1)
fit([callback], model=Accumulates(syncs=False))
assert callback.state.progress.steps == 2

# With a correction the Trainer would clip steps to a norm meant for gradients.
with pytest.raises(ValueError, match=r"gradient_clip_val=0\.5 is .* with momentum_correction"):
    fit([GTopK(0.1, momentum_correction=0.9)], gradient_clip_val=0.5)


def loss_after(callbacks: list[Any], epochs: int) -> float:
    """Return a module's loss after epochs that clip to gradient_clip_val."""
    module = fit(callbacks, epochs, ByAdamW(), gradient_clip_val=0.05) if epochs else ByAdamW()
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        return float(module.layers(x).square().mean())


# A fit that clips learns as much as with whole gradients.
begun, dense_loss, ours = (
    loss_after([], 0),
    loss_after([], 12),
    loss_after([GTopK(density=0.25)], 12),
)
assert dense_loss < 0.5 * begun, (begun, dense_loss)
assert ours - dense_loss < 0.1 * (begun - dense_loss), (begun, dense_loss, ours)


class Failing(Callback):
    """Ends the fit with an error, and keeps the Trainer."""

    def on_train_batch_start(self, trainer: Any, *call: Any) -> None:
        self.trainer = trainer
        raise LookupError("of the script's own")


# The Trainer's clipping is restored for another fit.
failing = Failing()
with pytest.raises(LookupError, match="of the script's own"):
    fit([GTopK(0.1), failing], model=ByAdamW(), gradient_clip_val=0.5)
assert failing.trainer.gradient_clip_val == 0.5
print("Lightning uses gTop-k\n", end="", flush=True)
