"""Hugging Face Transformers: a callback that lets a Trainer's DDP exchange gradients by gTop-k.

Trainer(model, args, train_dataset=data, callbacks=[gtopk.transformers.GTopK(density=0.01)])

train begins    Trainer has wrapped the model in DistributedDataParallel: the hook of `gtopk.ddp` is
                registered on it, and takes over AdamW's steps and Trainer's `max_grad_norm`
logs            contain the report of the last step
checkpoints     contain each rank's residual and moments, and any number of ranks can load them
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
    """Registers gTop-k with a Trainer on two ranks or more, which wraps its model in DDP.

    density, options: as `gtopk.ddp.GTopKState` takes them, with compression=.
    state: of the hook, once training has begun: `state.skipped_steps` counts the steps that all
        ranks skipped, as a gradient or a sum was not finite.

    The hook makes the steps of torch's Adam and AdamW, which Trainer uses. `max_grad_norm` then
    clips the mean gradient before Adam's moments; until training ends, `grad_norm` in Trainer's
    logs is the norm of the agreed steps, and `args.max_grad_norm` is 0. With any other optimizer
    Trainer clips the agreed gradients.

    Another `train` of the same Trainer goes on with the residual, as does one that begins again
    with smaller batches (`auto_find_batch_size`). One from a checkpoint loads the residual from its
    folder, in `output_dir` or as `args.resume_from_checkpoint` names it.
    """

    def __init__(self, density: float = 0.001, **options: Any) -> None:
        self._density = density
        self._options = options
        self.state: GTopKState | None = None
        self._trainer: Trainer | None = None
        self._model: torch.nn.Module | None = None  # the model of the state, without DDP
        # DDP with the hook. Trainer frees it before it makes another: two would both reduce.
        self._wrapped: ref[DistributedDataParallel] | None = None
        self._max_grad_norm = 0.0  # Trainer's, while the hook clips in its place
        self._name = ""  # of this run's folder in checkpoints

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Register the hook; raise ValueError where Trainer has not wrapped the model in DDP."""
        self._trainer = trainer = _in_training(self)
        # Trainer compiles last: DDP is inside the compiled module.
        model = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                "gtopk.transformers.GTopK needs a Trainer that wraps the model in "
                "DistributedDataParallel: start the script on two ranks or more, by torchrun, and "
                f"without FSDP or DeepSpeed; got {type(model).__name__} on {args.world_size} "
                f"{'process' if args.world_size == 1 else 'processes'}"
            )
        # An AcceleratedOptimizer wraps the optimizer that steps.
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        before = self.state if self._model is model.module else None
        held = None if before is None else before.state_dict(model)
        self.state = GTopKState(
            self._density,
            optimizer=optimizer,
            scaler=trainer.accelerator.scaler,
            **self._options,
        )
        # args lacks it where an error has ended the training before, which did not restore it.
        norm = args.max_grad_norm or self._max_grad_norm
        instead = "give TrainingArguments(max_grad_norm=0)"
        if norm and take_over_clipping(self.state, norm, "max_grad_norm", instead):
            args.max_grad_norm, self._max_grad_norm = 0.0, norm
        saved = state.stateful_callbacks.get(_KEY)
        if state.global_step and saved is not None:
            held = self._load(saved, args, state, optimizer)
        if held is not None:
            self.state.load_state_dict(held, model)
        # A name of the run's own: a folder left by another run in the same place is never taken for
        # ours.
        self._name = broadcast_object(f"gtopk-{secrets.token_hex(4)}", 0)
        folder = str(Path(args.output_dir).absolute())
        state.stateful_callbacks[_KEY] = {"name": self._name, "output_dir": folder}
        self._model = model.module
        if self._wrapped is None or self._wrapped() is not model:
            self._wrapped = ref(model)
            # DDP takes a hook only once: it gets the callback, whose state may be replaced.
            model.register_comm_hook(self, _exchange)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Accept the agreed steps again: to get their norm, Trainer has multiplied them by 1."""
        if self.state is not None:
            self.state.accept_gradients()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Note the residual's norm where Trainer is about to save, to warn of it if it is lost."""
        if control.should_save and self.state is not None and self._model is not None:
            (held,) = self.state.state_dict(self._model)["held"].values()
            state.stateful_callbacks[_KEY]["norm"] = f"{norm_of(held.values()):.3g}"

    on_epoch_end = on_step_end

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        """Log the report of the last step when Trainer logs a loss, by Trainer's reporters."""
        step = None if self.state is None else self.state.last_step
        if logs and "loss" in logs and step is not None and self._trainer is not None:
            self._trainer.log(dict(scalars_of_step(step)))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Save each rank's residual and moments in Trainer's checkpoint."""
        # Nothing goes on from a checkpoint without an optimizer, or from a trial of a search.
        if self.state is None or args.save_only_model or state.is_hyper_param_search:
            return
        assert self._model is not None
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", self._name)
        held = self.state.state_dict(self._model)
        save_checkpoint(folder, None, None, step=state.global_step, keep=1, residuals=held)
        # An earlier run in this output_dir may have come as far, and left its residuals here.
        if args.local_process_index == 0:
            for each in folder.parent.glob("gtopk-*"):
                if each != folder:
                    shutil.rmtree(each, ignore_errors=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Restore Trainer's max_grad_norm."""
        args.max_grad_norm, self._max_grad_norm = args.max_grad_norm or self._max_grad_norm, 0.0

    def _load(
        self,
        saved: dict[str, str],
        args: TrainingArguments,
        state: TrainerState,
        optimizer: torch.optim.Optimizer,
    ) -> dict[str, Any] | None:
        """Return this rank's state in the checkpoint that Trainer resumes from; None: not found.

        Trainer does not tell the folder, so several are tried. A warning says if none has it.
        """
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        folders = [Path(saved["output_dir"], name), Path(args.output_dir, name)]
        if args.resume_from_checkpoint:
            folders.insert(0, Path(args.resume_from_checkpoint))
        # All ranks must take the same folder, and hosts may not share one: what any rank sees
        # counts.
        here = [(folder / saved["name"]).is_dir() for folder in folders]
        for folder, *ranks in zip(folders, *allgather_object(here), strict=True):
            if not any(ranks):
                continue
            found = load_latest(
                folder / saved["name"], None, generators=False, missing_ranks="report"
            )
            if found is not None:
                _take_precise_state(optimizer, folder)
                held: dict[str, Any] = found.values["residuals"]
                return held
        # The warning below tells of the loss: the first step must not tell of it again.
        ResidualNote.take(optimizer)
        if args.process_index == 0:
            _log.warning(
                "the residuals and moments that gtopk saved with %s, at step %d, are in none of "
                "%s: all ranks begin without (the norm of rank 0's residual was %s); if they are "
                "elsewhere, name the checkpoint's folder in "
                "TrainingArguments(resume_from_checkpoint=...), too",
                name,
                state.global_step,
                ", ".join(map(str, dict.fromkeys(folders))),
                saved.get("norm", "not noted"),
            )
        return None


def _exchange(callback: GTopK, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket by the callback's current state."""
    assert callback.state is not None
    return gtopk_hook(callback.state, bucket)


def _in_training(callback: TrainerCallback) -> Trainer:
    """Return the Trainer that calls a callback, from the stack.

    Trainer gives its callbacks the model, without DDP around it.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    raise RuntimeError(
        "gtopk.transformers.GTopK is called by transformers.Trainer or a class derived from it"
    )


def _take_precise_state(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load an optimizer's state again, now that the hook keeps float32 state in float32.

    torch casts state to the parameters' dtype, and Trainer has loaded it before the hook was there.
    """
    path = folder / OPTIMIZER_NAME
    if path.is_file() and any(p.dtype.itemsize < 4 for p in parameters_of(optimizer)):
        optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
