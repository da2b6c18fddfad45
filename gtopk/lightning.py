"""Lightning: gTop-k for DDP, by a callback for its Trainer or a function for Fabric.

    Trainer(strategy="ddp", callbacks=[gtopk.lightning.GTopK(density=0.01)])

setup           Lightning wraps the module in DistributedDataParallel
fit begins      the callback registers the hook of `gtopk.ddp` on it
batches         the Trainer's loggers get the last step's report
checkpoints     contain the residuals of all ranks; any number of ranks can resume from them

    model, optimizer = fabric.setup(model, optimizer)
    state = gtopk.lightning.compress(fabric, model, optimizer, density=0.01)
    fabric.save(path, {"model": model, "optimizer": optimizer, "gtopk": state.stateful(model)})
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

try:
    from lightning.fabric import Fabric
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    raise ImportError("gtopk.lightning needs Lightning: pip install lightning") from missing

from .ddp import GTopKState, gtopk_hook, state_for, take_over_clipping
from .exchange.buckets.parameters import require_module
from .integrations.passes import unwrapped
from .telemetry.sinks import scalars_of_step

__all__ = ["GTopK", "compress"]


class _TrainersState(GTopKState):
    """A hook's state whose messages name what a LightningModule has."""

    _accumulation_hint = "within `with self.trainer.model.no_sync():`"
    _clipping_hint = "The Trainer's gradient_clip_val clips before the moments"


class GTopK(Callback):
    """Registers gTop-k with a Trainer whose strategy is "ddp", or a DDPStrategy.

    density, options: the arguments of `gtopk.ddp.GTopKState`, including compression=. If the module
        has a single optimizer, it is passed to the state: AdamW's steps are then made before the
        selection, the Trainer's gradient_clip_val becomes the state's global_clip_norm, and
        gradient_clip_algorithm must be "norm".
    state: the hook's state during a fit; `state.skipped_steps` counts the steps that all ranks
        skipped because a gradient or a sum was not finite. Another fit of the same module keeps the
        residual, unless it starts from a checkpoint.
    """

    def __init__(self, density: float = 0.001, **options: Any) -> None:
        self._density = density
        self._options = options
        self._loaded: dict[str, Any] | None = None  # empty: the checkpoint has no gTop-k part
        self._module: LightningModule | None = None  # the state's module
        self._is_fitting = False  # whether the hook is registered on the Trainer's model
        self._clip_val: float | None = None  # the Trainer's value, while the state clips instead
        self.state: GTopKState | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook; raise ValueError if the strategy is not DDP."""
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                "gtopk.lightning.GTopK needs a Trainer that wraps the module in "
                f"DistributedDataParallel: use strategy='ddp', got "
                f"{type(trainer.strategy).__name__}"
            )
        # The Trainer wraps the module again for each fit, and DDP takes a hook only once. So move
        # the previous fit's residual to a new state, unless a checkpoint was loaded.
        if self._loaded is None and self.state is not None and self._module is pl_module:
            self._loaded = self.state.state_dict(model)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        options: dict[str, Any] = {"optimizer": optimizer, "scaler": scaler, **self._options}
        self.state = _TrainersState(self._density, **options)
        if trainer.gradient_clip_val:
            self._take_over_clipping(self.state, trainer, float(trainer.gradient_clip_val))
        if self._loaded:
            self.state.load_state_dict(self._loaded, model)
        self._loaded, self._module, self._is_fitting = None, pl_module, True
        model.register_comm_hook(self.state, gtopk_hook)

    def _take_over_clipping(self, state: GTopKState, trainer: Trainer, norm: float) -> None:
        """Let the state clip instead of the Trainer; raise ValueError if neither can clip."""
        if not take_over_clipping(state, norm, "gradient_clip_val", "leave gradient_clip_val out"):
            return
        # An enum, its text, or None for the default.
        algorithm = str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm")
        if algorithm != "norm":
            raise ValueError(
                f"gradient_clip_algorithm={algorithm!r} would clip AdamW's steps instead of "
                "gradients: use 'norm', which clips the mean gradient before the moments, or "
                "GTopK(adam_steps='after')"
            )
        trainer.gradient_clip_val, self._clip_val = None, norm

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the Trainer's gradient_clip_val, and leave the module to other code."""
        self._is_fitting = False
        if self.state is not None:
            self.state.retire()
        if self._clip_val is not None:
            trainer.gradient_clip_val, self._clip_val = self._clip_val, None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore gradient_clip_val after an error: Lightning does not call `on_fit_end` then."""
        self.on_fit_end(trainer, pl_module)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Skip a step in which some rank's gradient was not finite: Lightning steps by closures.

        With a scaler there is nothing to do: it must see the NaN to lower its scale, and it steps
        without a closure.
        """
        if self.state is not None and self.state.scaler is None:
            self.state.drop_skipped(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log rank 0's report of the last step, at the interval of the Trainer's loggers."""
        if self.state is not None and self.state.last_step is not None:
            pl_module.log_dict(dict(scalars_of_step(self.state.last_step)), batch_size=1)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add all ranks' residuals to a checkpoint; Lightning calls this on all ranks."""
        model = trainer.strategy.model
        if self.state is not None and model is not None:
            checkpoint["gtopk"] = self.state.gather_state(model)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the checkpoint's residuals, if it has any, until the module is wrapped.

        Within a fit (LearningRateFinder saves and loads a checkpoint there) load them at once.
        """
        # Without a gTop-k part: empty, not None, so that the fit drops an earlier fit's residual.
        part = checkpoint.get("gtopk", {})
        if not self._is_fitting:
            self._loaded = part
        elif part and self.state is not None and (model := trainer.strategy.model) is not None:
            self.state.load_state_dict(part, model)


def compress(
    fabric: Fabric,
    model: torch.nn.Module,
    optimizer: Any,
    density: float = 0.001,
    **options: Any,
) -> GTopKState:
    """Exchange the gradients of a model set up by Fabric with gTop-k; return the hook's state.

    model, optimizer: as `fabric.setup` returned them; give several optimizers as a sequence. A
        single optimizer is passed to the state: AdamW's steps are then made before the selection,
        and global_clip_norm= replaces fabric.clip_gradients.
    density, options: the arguments of `gtopk.ddp.GTopKState`, including compression=.
    Raises ValueError if the model is not wrapped in DistributedDataParallel, and TypeError for an
    object that is not a Fabric, a model or an optimizer.
    """
    if not isinstance(fabric, Fabric):
        raise TypeError(f"compress(fabric, model, optimizer) got a {type(fabric).__name__} first")
    require_module(model)
    wrapped = unwrapped(model)
    if not isinstance(wrapped, DistributedDataParallel):
        raise ValueError(
            "gtopk.lightning.compress needs a model that fabric.setup has wrapped in "
            f"DistributedDataParallel: use Fabric(strategy='ddp') on two ranks or more, got "
            f"{type(wrapped).__name__} on {fabric.world_size} "
            f"{'process' if fabric.world_size == 1 else 'processes'}"
        )
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    state = state_for(optimizer, density, **{"scaler": scaler, **options})
    wrapped.register_comm_hook(state, gtopk_hook)
    return state
