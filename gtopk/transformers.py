"""Hugging Face Transformers: a callback that makes a Trainer's DDP exchange gradients with gTop-k.

Trainer(model, args, train_dataset=data, callbacks=[gtopk.transformers.GTopK(density=0.01)])

train begins    Trainer has wrapped the model in DistributedDataParallel; the callback registers the
                hook of `gtopk.ddp`, which takes over AdamW's steps and Trainer's `max_grad_norm`
logs            contain the last step's report
checkpoints     contain each rank's residual and moments; any number of ranks can load them
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with types.
import logging
import secrets
import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final
from weakref import ref

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

try:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer import OPTIMIZER_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as missing:
    raise ImportError(
        "gtopk.transformers needs Transformers: pip install transformers accelerate"
    ) from missing

from .ddp import GTopKState, gtopk_hook, take_over_clipping
from .exchange.buckets.parameters import parameters_of
from .exchange.residual_state import norm_of
from .integrations.optimizer_checks import ResidualNote
from .telemetry.sinks import scalars_of_step
from .torch.checkpoint import load_latest, save_checkpoint
from .torch.functions import allgather_object, broadcast_object

__all__ = ["GTopK"]

_log = logging.getLogger("gtopk")
_KEY: Final = "gtopk"  # in the saved TrainerState


class GTopK(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Registers gTop-k with a Trainer on two ranks or more, where Trainer wraps its model in DDP.

    density, options: the arguments of `gtopk.ddp.GTopKState`, including compression=.
    state: the hook's state once training has begun; `state.skipped_steps` counts the steps that all
        ranks skipped because a gradient or a sum was not finite.

    The hook makes the steps of torch's Adam and AdamW, which Trainer uses. `max_grad_norm` then
    clips the mean gradient before Adam's moments; until training ends, `grad_norm` in Trainer's
    logs is the norm of the agreed steps, and `args.max_grad_norm` is 0. With any other optimizer
    Trainer clips the agreed gradients.

    Another `train` of the same Trainer keeps the residual, and so does a restart with smaller
    batches (`auto_find_batch_size`). Training from a checkpoint loads the residual from the
    checkpoint's folder, in `output_dir` or given as `args.resume_from_checkpoint`.
    """

    def __init__(self, density: float = 0.001, **options: Any) -> None:
        self._density = density
        self._options = options
        self.state: GTopKState | None = None
        self._trainer: Trainer | None = None
        self._model: torch.nn.Module | None = None  # the state's model, without DDP
        # The DDP module with the hook. A weak reference: Trainer must be able to free it before it
        # makes another, as two would both reduce.
        self._wrapped: ref[DistributedDataParallel] | None = None
        self._max_grad_norm = 0.0  # Trainer's value, while the hook clips instead
        self._name = ""  # this run's folder in checkpoints

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Register the hook; raise ValueError if Trainer has not wrapped the model in DDP."""
        self._trainer = trainer = _calling_trainer(self)
        # Trainer compiles the model last, so DDP is inside the compiled module.
        model = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                "gtopk.transformers.GTopK needs a Trainer that wraps the model in "
                "DistributedDataParallel: start the script with torchrun on two ranks or more, and "
                f"without FSDP or DeepSpeed; got {type(model).__name__} on {args.world_size} "
                f"{'process' if args.world_size == 1 else 'processes'}"
            )
        # An AcceleratedOptimizer wraps the real one.
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        previous = self.state if self._model is model.module else None
        residuals = None if previous is None else previous.state_dict(model)
        options: dict[str, Any] = {"optimizer": optimizer, "scaler": trainer.accelerator.scaler}
        self.state = GTopKState(self._density, **{**options, **self._options})
        # In args it is still 0 if an error ended the previous training before `on_train_end`.
        norm = args.max_grad_norm or self._max_grad_norm
        instead = "give TrainingArguments(max_grad_norm=0)"
        if norm and take_over_clipping(self.state, norm, "max_grad_norm", instead):
            args.max_grad_norm, self._max_grad_norm = 0.0, norm
        saved = state.stateful_callbacks.get(_KEY)
        if state.global_step and saved is not None:
            residuals = self._load(saved, args, state, optimizer)
        if residuals is not None:
            self.state.load_state_dict(residuals, model)
        # A name unique to the run, so that a folder of an earlier run in the same place is not
        # mistaken for this run's.
        self._name = broadcast_object(f"gtopk-{secrets.token_hex(4)}", 0)
        folder = str(Path(args.output_dir).absolute())
        state.stateful_callbacks[_KEY] = {"name": self._name, "output_dir": folder}
        self._model = model.module
        if self._wrapped is None or self._wrapped() is not model:
            self._wrapped = ref(model)
            # DDP takes a hook only once, so it gets the callback, whose state can be replaced.
            model.register_comm_hook(self, _exchange)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Accept the agreed steps again: Trainer multiplied them by 1 when it took their norm."""
        if self.state is not None:
            self.state.accept_gradients()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Note the residual's norm before Trainer saves, for the warning if it is lost later."""
        if control.should_save and self.state is not None and self._model is not None:
            (residuals,) = self.state.state_dict(self._model)["held"].values()
            state.stateful_callbacks[_KEY]["norm"] = f"{norm_of(residuals.values()):.3g}"

    on_epoch_end = on_step_end

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        """Log the last step's report to Trainer's reporters when Trainer logs a loss."""
        step = None if self.state is None else self.state.last_step
        if logs and "loss" in logs and step is not None and self._trainer is not None:
            self._trainer.log(dict(scalars_of_step(step)))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Save each rank's residual and moments in Trainer's checkpoint."""
        # Nobody resumes from a checkpoint without an optimizer, or from a trial of a search.
        if self.state is None or args.save_only_model or state.is_hyper_param_search:
            return
        assert self._model is not None
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", self._name)
        residuals = self.state.state_dict(self._model)
        save_checkpoint(folder, None, None, step=state.global_step, keep=1, residuals=residuals)
        # Remove the residuals that an earlier run in this output_dir saved at the same step.
        if args.local_process_index == 0:
            for each in folder.parent.glob("gtopk-*"):
                if each != folder:
                    shutil.rmtree(each, ignore_errors=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Restore Trainer's max_grad_norm, and leave the model and the optimizer to other code."""
        if self.state is not None:
            self.state.retire()
        args.max_grad_norm, self._max_grad_norm = args.max_grad_norm or self._max_grad_norm, 0.0

    def _load(
        self,
        saved: dict[str, str],
        args: TrainingArguments,
        state: TrainerState,
        optimizer: torch.optim.Optimizer,
    ) -> dict[str, Any] | None:
        """Return this rank's state from the checkpoint that Trainer resumes from; None: not found.

        Trainer does not say which folder that is, so this tries several, and warns if none has it.
        """
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        folders = [Path(saved["output_dir"], name), Path(args.output_dir, name)]
        if args.resume_from_checkpoint:
            folders.insert(0, Path(args.resume_from_checkpoint))
        # All ranks must use the same folder, but hosts may not share a disk: take the first folder
        # that any rank sees.
        is_here = [(folder / saved["name"]).is_dir() for folder in folders]
        for folder, *ranks in zip(folders, *allgather_object(is_here), strict=True):
            if not any(ranks):
                continue
            found = load_latest(
                folder / saved["name"], None, generators=False, missing_ranks="report"
            )
            if found is not None:
                _reload_float32_state(optimizer, folder)
                residuals: dict[str, Any] = found.values["residuals"]
                return residuals
        # The warning below reports the loss; the first step must not report it again.
        ResidualNote.take(optimizer)
        if args.process_index == 0:
            _log.warning(
                "the residuals and moments that gtopk saved with %s, at step %d, are in none of "
                "%s: all ranks start without them (the norm of rank 0's residual was %s); if they "
                "are elsewhere, also pass the checkpoint's folder as "
                "TrainingArguments(resume_from_checkpoint=...)",
                name,
                state.global_step,
                ", ".join(map(str, dict.fromkeys(folders))),
                saved.get("norm", "not noted"),
            )
        return None


def _exchange(callback: GTopK, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket with the callback's current state."""
    assert callback.state is not None
    assert callback._trainer is not None
    if callback not in callback._trainer.callback_handler.callbacks:
        raise RuntimeError(
            "gtopk.transformers.GTopK was removed from its Trainer, but DistributedDataParallel "
            "cannot give up the hook: make a new Trainer without the callback"
        )
    return gtopk_hook(callback.state, bucket)


def _calling_trainer(callback: TrainerCallback) -> Trainer:
    """Return the Trainer that calls a callback, found on the stack.

    Trainer passes only the bare model to its callbacks, without DDP.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    raise RuntimeError(
        "gtopk.transformers.GTopK must be called by transformers.Trainer or a class derived from it"
    )


def _reload_float32_state(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load an optimizer's state again, now that the hook keeps float32 state in float32.

    Trainer loaded it before the hook was registered, when torch cast it to the parameters' dtype.
    """
    path = folder / OPTIMIZER_NAME
    if path.is_file() and any(p.dtype.itemsize < 4 for p in parameters_of(optimizer)):
        optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
