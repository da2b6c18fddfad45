"""Lightning: a callback that lets a Trainer's DDP exchange gradients by gTop-k.

Trainer(strategy="ddp", callbacks=[gtopk.lightning.GTopK(density=0.01)])

setup           Lightning wraps the module in DistributedDataParallel
fit begins      the hook of `gtopk.ddp` is registered on it
checkpoints     have the residuals of all ranks, for any number of ranks to go on from
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    raise ImportError("gtopk.lightning needs Lightning: pip install lightning") from missing

from .ddp import GTopKState, gtopk_hook

__all__ = ["GTopK"]


class GTopK(Callback):
    """Registers gTop-k with a Trainer whose strategy is "ddp", or a DDPStrategy.

    density, options: as `gtopk.ddp.GTopKState` takes them.
    state: of the hook, while a fit goes on: `state.skipped_steps` counts the steps that all ranks
        passed over, as a gradient or a sum was not finite. Another fit of the same module goes on
        with the residual, unless it begins from a checkpoint.
    """

    def __init__(self, density: float = 0.001, **options: Any) -> None:
        self._density = density
        self._options = options
        self._loaded: dict[str, Any] | None = None  # empty: of a checkpoint without gTop-k
        self._module: LightningModule | None = None  # that the state is of
        self.state: GTopKState | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook; raise ValueError where the strategy is another."""
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                "gtopk.lightning.GTopK needs a Trainer that wraps the module in "
                f"DistributedDataParallel: use strategy='ddp', got "
                f"{type(trainer.strategy).__name__}"
            )
        if self._loaded is None and self.state is not None and self._module is pl_module:
            self._loaded = self.state.state_dict(model)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.state = GTopKState(self._density, scaler=scaler, **self._options)
        if self._loaded:
            self.state.load_state_dict(self._loaded, model)
        self._loaded, self._module = None, pl_module
        model.register_comm_hook(self.state, gtopk_hook)
        if scaler is not None:  # which has to see a NaN before it is dropped
            for optimizer in trainer.optimizers:
                optimizer.register_step_pre_hook(self.state.drop_skipped)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Pass over a step in which a gradient was not finite on some rank."""
        if self.state is not None and self.state.scaler is None:
            self.state.drop_skipped(optimizer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the residuals of all ranks; Lightning calls it on all of them."""
        model = trainer.strategy.model
        if self.state is not None and model is not None:
            checkpoint["gtopk"] = self.state.gather_state(model)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep it until the module is wrapped; a checkpoint of a run without gTop-k is fine."""
        self._loaded = checkpoint.get("gtopk", {})
