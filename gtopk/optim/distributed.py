"""DistributedOptimizer: the wrapped optimizer steps with gradients that all ranks agreed on."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch

from ..compression import Compressing, Compression
from ..exchange.bucket_exchange import gradient_norm
from ..exchange.buckets.parameters import name_parameters, require_trained
from ..reduce_ops import Adasum, Average
from ..runtime.world import world
from ..runtime.world.process_sets import ProcessSet, global_process_set
from ..telemetry.run_record import note_step
from ..telemetry.step_report import StepReport, report
from ..telemetry.timeline import Span, Step, timelines
from .adasum import distribute_adasum
from .gradient_checks import (
    RECIPE,
    CorrectedGradients,
    SharedParameters,
    log_advice,
    loss_scale,
    prefetch_scale,
    require_no_fused_unscaling,
    require_one_momentum,
    require_scaled,
)
from .options import Groups, Options, warn_of_few_entries
from .reducer import Reducer
from .samples import Samples, clip_to_norm
from .step_checks import MAX_SKIPPED_STEPS, ReplicaCheck, SkippedSteps, name_culprits
from .wrapped import adam_step
from .wrapped import checkpoint as optimizer_checkpoint
from .wrapped.local_residual import LocalResidual
from .wrapped.wrapping import Readings, StepListener, wrap

_log = logging.getLogger("gtopk")


class _DistributedOptimizer(Readings):
    """The result of `DistributedOptimizer`: a mixin, which `wrap` combines with the user's class.

    last_step: the report of the last step; None before the first.
    """

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        options: Options,
        backward_passes_per_step: int,
        scaler: Any,
    ) -> None:
        self._world = world.current()
        self._parameter_names = name_parameters(self, named_parameters)
        self._options = options
        require_trained(self._parameter_names)
        self._reducer = Reducer(self._wrapped, self._parameter_names, options, self._world, scaler)
        self._local = LocalResidual(self._reducer) if options.local_residual else None
        self.set_backward_passes_per_step(backward_passes_per_step)
        self._has_advised = False
        self._should_synchronize = True
        self._synchronized = False
        self._skip = False
        self._is_weightless = False  # a placeholder batch, as this rank has none: it weighs 0
        self._listener = StepListener()
        self._exchange_ended: float | None = None
        self._replicas = ReplicaCheck(self._reducer, options.check_every, options.on_divergence)
        self._skipped = SkippedSteps(options.max_skipped_steps)
        self._agreed: adam_step.AgreedSteps | None = None
        adam = "global_clip_norm= and local_clip_norm= clip before it." if options.adam else ""
        self._corrected = CorrectedGradients(options.compression, adam)
        self._shared = SharedParameters(self._parameter_names, self._set_aside)
        self.last_step: StepReport | None = None

    @property
    def scaler(self) -> Any:
        """The GradScaler whose scale the gradients have when they are synchronized, or None."""
        return self._reducer.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        self._reducer.scaler = scaler

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes to accumulate before a step."""
        self._reducer.hooks.set_limit(passes)

    def set_num_samples(
        self, samples: int | None, loss_reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        """Set the number of samples (or tokens) behind this rank's gradients, until the next call.

        The update then follows from one mean over the samples of all ranks: the gradient of a mean
        is weighted by samples / total, of a sum by 1 / total; one of no samples by 0, even NaN.
        None: all ranks have the same weight. It is an error if only some ranks set a number.
        Call it before the backward pass; after it, buckets already exchanged are sent again.
        With SyncBatchNorm, which also uses the number, call it before the forward pass.
        While an adapted loader yields a placeholder for a missing batch, the number stays 0.
        Raises ValueError for a number out of range, or with op=Sum; TypeError for a non-integer.
        """
        if samples is not None and self.op != Average:
            raise ValueError("set_num_samples weights an average: use op=Average")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
        if self._is_weightless and samples is not None:
            samples = 0
        self._reducer.samples = Samples(samples, summed=loss_reduction == "sum")

    def _log_compression(self, *, by_mode: bool = False) -> None:
        """Warn, once and on rank 0, if the compression may cost accuracy.

        by_mode: a mode of `adapt` steps the wrapped optimizer with the exchanged gradients.
        """
        if self._world.rank == 0 and not self._has_advised:
            elements = self._options.elements_compressed(self._parameter_names)
            warn_of_few_entries(self._options.compression, elements)
            if elements and (by_mode or not self._makes_adam_steps):
                log_advice(self._wrapped, self._options.compression)
        self._has_advised = True

    def synchronize(self) -> None:
        """Replace every gradient with the agreed update.

        All ranks skip the step if a gradient is not finite on any rank, or if a sum is not: a dense
        sum in the gradients' dtype, a sparse one in float32. Residuals then do not change,
        gradients become NaN on every rank, and `step` applies nothing. The part of a sparse sum
        beyond float16 stays in the residual.
        Raises HorovodInternalError, on every rank alike, if the ranks disagree, and
        FloatingPointError if more steps in a row were skipped than max_skipped_steps.
        """
        if (here := world.current()) is not self._world:  # such as after an elastic recovery
            self._reducer.enter(here)
            self._listener.enter(here)
            self._world = here
        if not self._reducer.peers.takes_part or not self._reducer.trains():  # all are frozen
            self._synchronized = True
            return
        require_scaled(self.scaler, self)
        # Without other ranks, exchanging twice does no harm.
        if self._reducer.peers.size > 1:
            self._shared.refuse_agreed(self._world.rank)
        self._log_compression()
        begun, ended_before = time.perf_counter(), self._exchange_ended
        transaction = self._reducer.exchange_gradients()
        reduced = time.perf_counter()
        if transaction.is_asynchronous:  # on a GPU: backward may only have been launched by then
            begun = max(begun, min(transaction.ready, reduced))
        self._skip = not transaction.finite()
        if self._skip:
            transaction.skip()
            if self._local is not None:
                self._local.restore()  # here, because a GradScaler will not call `step` now
        else:
            self._reducer.apply(transaction)
            if self._makes_adam_steps:
                self._agreed = adam_step.AgreedSteps(self._reducer.trained())
        self._replicas.await_step(not self._skip, self._reducer.planned.started)
        self._synchronized = True
        self._exchange_ended = time.perf_counter()
        self.last_step = report(
            transaction,
            step=self._world.step,
            compute_seconds=begun - ended_before if ended_before else 0.0,
            waits=[(begun, self._exchange_ended)],
            apply_seconds=self._exchange_ended - reduced,
            expected=self._reducer.expected,
            skipped=self._skip,
            samples=transaction.samples.count,
            gradient_norm=gradient_norm(transaction.bucket_exchanges, transaction.clip.applied),
        )
        steps = None if self._skip else self._reducer.progress.steps
        if steps is not None:
            seconds = transaction.ready - ended_before if ended_before else None
            self._reducer.stragglers.note(steps, seconds)
        note_step(self._world, self.last_step, steps, self._reducer.planned.bucket_exchanges)
        if (timeline := timelines.get(self._world)) is not None:
            began = self._reducer.progress.backward_began
            spans = [Span("SYNCHRONIZE", begun, self._exchange_ended)]
            if began > (ended_before or 0.0):  # otherwise not recorded, such as on a single rank
                ended = began + self._reducer.progress.backward_seconds
                spans.insert(0, Span("BACKWARD", began, ended))
            working, hidden = self.last_step.working_seconds, self.last_step.hidden_seconds
            timeline.note_step(Step(self._reducer.peers.name, spans, working, hidden))
        if self._skip:
            where = name_culprits(transaction.culprits)
            self._skipped.note(self._world.rank, self._world.step, where)
        else:
            self._skipped.end_row()
            self._clip(self.scaler)
            self._corrected.agree(self._parameter_names, self.scaler)
        self._shared.note_agreed()

    def _clip(self, scaler: Any) -> None:
        """Clip the agreed update to global_clip_norm; scaler: whose scale it has, or None."""
        allowed = self._options.global_clip_norm
        if allowed is None or self._makes_adam_steps:  # Adam's gradients were clipped before
            return
        gradients = [p.grad for p in self._reducer.trained() if p.grad is not None]
        clip_to_norm(gradients, allowed, loss_scale(scaler))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` apply the gradients as they are, after `synchronize()` and, say, clipping."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then step the wrapped optimizer with the agreed update.

        closure: called once, before synchronizing, to compute the loss and the gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._should_synchronize:
            if self._synchronized and not self._reducer.is_discarded:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are exchanged twice. Use\n"
                    "    optimizer.synchronize()\n    with optimizer.skip_synchronize():\n"
                    "        optimizer.step()",
                    stacklevel=2,
                )
            # A single rank may unscale anywhere: its scale cannot diverge from other ranks'.
            if self._reducer.peers.size > 1:
                require_no_fused_unscaling(self)
            self.synchronize()
        elif self._makes_adam_steps and not self._synchronized:
            raise ValueError(
                "step() within skip_synchronize() applies the agreed steps of AdamW, and there are "
                "none: call synchronize() first, or use adam_steps='after'"
            )
        elif not self._synchronized and self._reducer.exchanges:  # as in Horovod it steps
            problem = f"rank {self._world.rank} steps with its own gradients: replicas will differ"
            remedy = "call synchronize() before step() within skip_synchronize()"
            warnings.warn(f"{problem}; {remedy}", stacklevel=2)
        self._synchronized = False
        if not self._skip:
            self._corrected.require_unchanged(self)
            self._step_wrapped()
        if self._local is not None:
            # A skipped step did not use the center: restore it, or parameters would stay c - a.
            self._local.restore()
        # Only now: until the optimizer has stepped, `drop` returns the update to the residual.
        self._reducer.commit()
        self._shared.note_step()  # again: the script may have clipped
        self._skip = False
        self._listener.end_step()
        self._world.step += 1
        if self._reducer.peers.takes_part:
            self._replicas.after_step(self.state)
        if self._local is not None:
            self._local.end_step()
        return loss

    def _set_aside(self) -> None:
        """Let another optimizer use the parameters, until `zero_grad` or `step` is called."""
        self._reducer.hooks.set_aside()
        if self._local is not None:
            self._local.restore()

    @property
    def _makes_adam_steps(self) -> bool:
        """Whether the synchronized gradients are AdamW's agreed steps."""
        exchanges = self._reducer.peers.takes_part and not self._reducer.stepping_mode
        return self._options.adam is not None and exchanges

    def _step_wrapped(self) -> None:
        """Step as the wrapped optimizer does, or apply AdamW's agreed steps if there are any."""
        if self._makes_adam_steps:
            agreed, self._agreed = self._agreed, None
            # Read the gradients inside the step: its pre-hooks, which run first, may clip them.
            self._take_agreed_step(partial(adam_step.apply_agreed_steps, agreed=agreed))
        else:
            super()._step_wrapped()

    def eval(self) -> None:
        """Set the parameters to the model that is the same on all ranks, until `train`.

        With local_residual they already are between a step and the next forward pass, and for a
        model in eval mode: call this before code that reads them at other times.
        """
        if self._local is not None:
            self._local.eval()

    def train(self) -> None:
        """Let training forward passes include this rank's residual again, after `eval`."""
        if self._local is not None:
            self._local.train()

    def evaluating(self) -> AbstractContextManager[None]:
        """Within the context, set the parameters to the model that is the same on all ranks."""
        return nullcontext() if self._local is None else self._local.evaluating()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and discard all work towards the next step.

        Also undo an update by `synchronize` (say of a discriminator's gradients from the
        generator's loss), and restore the residual. The update stays sent if a parameter has
        changed since, as when another optimizer steps instead, or if a rank has joined.
        Warns of non-finite gradients that were not exchanged: if a GradScaler skipped the step on
        this rank alone, the rank is a step behind the others from then on.
        """
        if not self._synchronized and self._reducer.drops_overflow():
            _log.warning(
                "rank %d: non-finite gradients are cleared without a step on this rank; if a "
                "GradScaler skipped the step, the other ranks do not know. %s",
                self._world.rank,
                RECIPE,
            )
        # The scaler is updated by now: read its new scale to the host while backward runs.
        prefetch_scale(self.scaler)
        self._synchronized, self._skip, self._agreed = False, False, None
        self._corrected.forget()
        self._reducer.drop()
        self._listener.drop()
        super().zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and under "gtopk" this rank's residual.

        Before the first step "gtopk" is missing.
        """
        part = optimizer_checkpoint.save(self._reducer)
        return {**self._state(), **({optimizer_checkpoint.KEY: part} if part["lanes"] else {})}

    def _state(self) -> dict[str, Any]:
        state = super().state_dict()
        optimizer_checkpoint.undo_step(state, self, self._reducer)
        return state

    def gather_state(self, root_rank: int = 0) -> dict[str, Any] | None:
        """Return the state with the residuals of all ranks, on the root; None on the others.

        A collective. Any number of ranks can load the result without losing a residual.
        """
        parts = optimizer_checkpoint.save_all(self._reducer, root_rank)
        return None if parts is None else {**self._state(), optimizer_checkpoint.KEY: parts}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state, and discard all work towards the next step.

        A plain optimizer's state leaves the residual unchanged. Raises as `require_plain` does.
        """
        optimizer_checkpoint.require_state(state_dict)
        if not self._makes_adam_steps:
            adam_step.require_plain(state_dict["state"].values(), self._world.rank)
        self._synchronized, self._skip, self._agreed = False, False, None
        self._corrected.forget()
        self._skipped.end_row()
        self._reducer.drop()
        # Before the load replaces the residual, which forward passes have subtracted.
        if self._local is not None:
            self._local.restore()
        super().load_state_dict(state_dict, *args, **kwargs)
        if self._options.adam is not None:
            adam_step.keep_precision(self._wrapped, state_dict)
        if (part := state_dict.get(optimizer_checkpoint.KEY)) is not None:
            optimizer_checkpoint.load(self._reducer, part)
            if self._local is not None:
                self._local.find_models()

    def forget_steps(self) -> None:
        """Empty the residual, as before the first step; loading a state_dict cannot do that."""
        self._reducer.import_state({}, [], 0)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Compressing = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    missing_gradients: Literal["error", "zeros"] = "zeros",
    overlap: bool = True,
    bucket_bytes: int | None = None,
    scaler: Any = None,
    local_clip_norm: float | None = None,
    global_clip_norm: float | None = None,
    check_every: int | None = None,
    on_divergence: Literal["error", "warn", "heal"] | None = None,
    max_skipped_steps: int = MAX_SKIPPED_STEPS,
    adam_steps: Literal["before", "after"] = "before",
    local_residual: bool | None = None,
) -> _DistributedOptimizer:
    """Wrap an optimizer so that its `step` is reduced over all ranks.

    The result's class derives from the optimizer's own class, and shares its parameter groups and
    state.

    Every rank must step its distributed optimizers alike. Ranks match them by the names of their
    parameters; optimizers with the same parameter names must be created in the same order on every
    rank.

    named_parameters: pairs of name and parameter, usually model.named_parameters().
    compression: Compression.none, .fp16, .bf16, .topk(density=...), .gtopk(density=...),
        .oktopk(density=...), .hierarchical(density=...), .shards(...), .auto(...), or a Compressor
        class; each says how to tune it. Top-k methods weight by 1/world size before the selection
        (op=Average), keep unsent values in a residual, and step with the agreed sparse update.
    backward_passes_per_step: how many backward passes to accumulate before a step.
    op: Average or Sum; or Adasum, which combines the changes of each rank's own step (`adasum`):
        options for exchanging gradients do not apply then, and the script must clip them itself.
    gradient_predivide_factor: divides the gradients before the sum, and multiplies the sum. Not
        used with a residual, where sums are in float32 or wider.
    groups: the number of buckets, or lists of parameters that share one; the plan (`bucket_plan`)
        places the other parameters. num_groups: Horovod's old name for a number.
    sparse_as_dense: exchange sparse gradients (of embeddings) as dense ones; afterwards they are
        sparse again, by rows. Otherwise the ranks' entries are gathered, uncompressed and without
        momentum_correction.
    process_set: the ranks that reduce together; other ranks step on their own.
    missing_gradients: for parameters with a gradient on some ranks only. "zeros": use zeros on the
        others; rank 0 warns once. "error": raise on all ranks. A parameter without a gradient on
        any rank is skipped, as without gtopk; its residual stays.
    overlap: exchange buckets during backward; the result is the same.
    bucket_bytes: the size from which a bucket is exchanged; None: the cost model chooses.
    scaler: the GradScaler that scales the loss, so that residuals stay correct when its scale
        changes. With or without this option, unscale between `synchronize()` and `step()`.
    local_clip_norm: clip each rank's part of the sum before it is added to the residual: its
        weighted gradient, to this norm / sqrt(ranks), or times sqrt(weight) if ranks are weighted
        by samples. A mean of independent gradients may then have this norm, though each gradient
        is sqrt(ranks) times as long. The norm of all gradients is known only after backward, so
        this excludes overlap.
    global_clip_norm: clip the agreed update to this norm; not with momentum_correction or
        adam_correction, whose updates are far longer than gradients. With adam_steps="before",
        clip the mean gradient before the moments: each rank estimates its norm as the norm of its
        own gradient times a ratio learnt from shared samples; this excludes overlap.
    check_every: compare the parameters of all ranks by hash, after the first step (also with a new
        parameter or a loaded state) and every `check_every` steps; 0: never; None: every 100.
        Skipped steps do not count; steps that other ranks take after this rank has joined do.
    on_divergence: what to do if they differ. "error": raise on every rank. "warn": warn. "heal":
        set each parameter and its optimizer state to that of more than half of the ranks, and
        warn; without such a majority it is an error. Residuals differ between ranks by design, and
        are not changed. None: "error" if check_every is given, else "warn".
    max_skipped_steps: how many steps in a row may be skipped because a gradient, or a sum, is not
        finite; 0: the first is an error.
    adam_steps: when to compute the steps of Adam and AdamW. "before": from each rank's gradients,
        before the selection, with a second moment that the ranks share (`exchange.adamw`). "after":
        from the agreed sparse update, which loses accuracy. "before" needs torch's own Adam or
        AdamW, and a compression with a residual, without momentum_correction, adam_correction and
        inside="dense"; from `synchronize` to `step` gradients are then the agreed steps.
    local_residual: whether training forward passes include this rank's unsent steps
        (`wrapped.local_residual`); None: yes with adam_steps="before". After `step`, and for a
        model in eval mode, parameters are the same on all ranks.
    Raises ValueError for an argument out of range, missing or duplicate names, doubled momentum,
    and LBFGS; TypeError for any other kind of compression.
    """
    if num_groups:
        warnings.warn(
            "num_groups is deprecated, as in Horovod: use groups", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    options = Options(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        missing_gradients=missing_gradients,
        overlap=overlap,
        bucket_bytes=bucket_bytes,
        local_clip_norm=local_clip_norm,
        global_clip_norm=global_clip_norm,
        check_every=check_every,
        on_divergence=on_divergence,
        max_skipped_steps=max_skipped_steps,
        **adam_step.options_of_adam(optimizer, compression, adam_steps, local_residual, op),
    )
    if op == Adasum:
        if process_set is not global_process_set:
            raise ValueError("op=Adasum is for all ranks: it takes no process_set")
        by_adasum: Any = distribute_adasum(
            optimizer, named_parameters, compression, backward_passes_per_step, max_skipped_steps
        )
        return cast(_DistributedOptimizer, by_adasum)  # has the same interface for scripts
    require_one_momentum(optimizer, options.feedback)
    distributed: _DistributedOptimizer = wrap(optimizer, _DistributedOptimizer)
    distributed._distribute(named_parameters, options, backward_passes_per_step, scaler)
    return distributed
