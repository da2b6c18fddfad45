"""A communication hook for PyTorch's DistributedDataParallel: gTop-k in place of its allreduce.

    model = DistributedDataParallel(model)
    model.register_comm_hook(gtopk.ddp.GTopKState(density=0.001), gtopk.ddp.gtopk_hook)

    backward     |   a   |   b   |  c  |        DDP hands over a bucket when it is full
    engine               [   a   ] [ b ][ c ]   all ranks exchange it meanwhile
                                            ^   backward ends when every bucket is back

A bucket holds the residual of its parameters. DDP rebuilds its buckets after the first step, unless
it is to find unused parameters: the residual moves along, parameter by parameter.

With find_unused_parameters, a parameter that no rank uses in a step still gets an update from the
residuals; where that is zero its .grad stays as DDP leaves it. The residual of a frozen parameter
waits until it is thawed.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with types.
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch._C._distributed_c10d import GradBucket, ProcessGroup

from collectives.transports import Transport

from .compression import GTopK, Shards
from .exchange.bucket_exchange import mean_square_ratio
from .exchange.residual_state import require_shapes, under_known_names
from .integrations.adam import check_clip_norm
from .integrations.hook_state import HookState, compression_of, join_world, plain_optimizer
from .integrations.passes import (
    BucketExchanges,
    HookReplicas,
    PendingBucket,
    after_backward,
    named_parameters,
    process_set_of,
    refuse_another_group,
    refuse_another_model,
    refuse_kinds,
    write_flat_gradients,
)
from .optim.gradient_checks import loss_scale
from .optim.peers import Peers
from .optim.samples import LocalClip
from .optim.step_checks import MAX_SKIPPED_STEPS
from .optim.step_transaction import PREEMPTED
from .optim.wrapped.adam_step import options_of_adam, plain
from .optim.wrapped.checkpoint import gather_held, residuals_for
from .reduce_ops import Average
from .runtime.coordinator import Operation

__all__ = ["GTopKState", "gtopk_hook"]


class GTopKState(HookState):
    """The state of `gtopk_hook` from step to step: each parameter's residual.

    Each model needs a state of its own; a step is one backward pass of that model.

    density: of every bucket; `options` are the others of Compression.gtopk. With
        momentum_correction the optimizer's own momentum must be 0, else its first step is an error.
        So is that of Adam and its kin with adam_correction.
    compression: a Compression.gtopk or Compression.shards, in place of density and options.
    optimizer: steps all parameters of the model. For torch's own Adam and AdamW the hook makes the
        steps, before it selects from them, as DistributedOptimizer does: from the end of backward
        on gradients are the agreed steps, and `step` applies them. Others step with agreed
        gradients.
    global_clip_norm: shortens the mean gradient before Adam's moments to about this norm: each
        rank shortens its own by a ratio that it learns. Buckets are then exchanged when the last
        one is full. With other optimizers clip after backward.
    adam_steps: "before" the selection, or "after": the optimizer steps with agreed gradients.
    local_residual: whether forward passes in training include Adam's steps that this rank has not
        sent yet; None: yes. Parameters are the same on all ranks again from `step` on, and in a
        model in eval mode.
    process_group: DDP's; None: all ranks. Another one must be a process set, too:
        hvd.init(process_sets=[hvd.ProcessSet(ranks)]).
    scaler: the GradScaler that scales the loss, to keep the residual as it is when its scale
        changes.
    max_skipped_steps: how many steps in a row may be skipped: one more is a FloatingPointError of
        the backward pass, on every rank.
    check_every: compare the ranks' parameters by hash, in the second pass and then every so many; 0
        never; None: every 100. on_divergence: "warn" of the first parameter that differs, or
        "error": the backward pass raises HorovodInternalError on every rank. None: "error" where
        check_every is given, else "warn". divergences: how many checks have warned.
    skipped_steps: in how many steps a gradient was not finite on some rank, or a sum beyond
        float32. From the bucket on where that shows, gradients become NaN on every rank, for a
        GradScaler to see; each optimizer of the model passes over such a step (`drop_skipped`). The
        residual is then as before the step. Of float16 gradients, the part of a sum that is beyond
        float16 stays in the residual, and the step counts.
    Joins the ranks (`hvd.init`) where nobody has. Raises ValueError for options out of range, and
    for a process group that gtopk does not know; the first backward pass does for complex
    parameters, sparse gradients, another group than DDP's. It has no pickle: save its state_dict.
    """

    _accumulating: ClassVar[str] = "within `with model.no_sync():`"
    _giving: ClassVar[str] = "give the hook's state the optimizer, GTopKState(optimizer=optimizer)"
    _saving: ClassVar[str] = (
        "Save model.module.state_dict() and state.state_dict(model), and give that to "
        "load_state_dict of a new GTopKState; average or copy model.module, not the DDP model"
    )
    _clipping: ClassVar[str] = "GTopKState(global_clip_norm=) clips before the moments"

    def __init__(
        self,
        density: float = 0.001,
        process_group: ProcessGroup | None = None,
        *,
        compression: GTopK | Shards | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
        max_skipped_steps: int = MAX_SKIPPED_STEPS,
        global_clip_norm: float | None = None,
        adam_steps: Literal["before", "after"] = "before",
        local_residual: bool | None = None,
        check_every: int | None = None,
        on_divergence: Literal["error", "warn"] | None = None,
        **options: Any,
    ) -> None:
        how = compression_of("DDP's hook", compression, density, options)
        optimizer = plain_optimizer(optimizer)
        of_adam = options_of_adam(optimizer, how, adam_steps, local_residual, Average)
        check_clip_norm(global_clip_norm, makes_adam_steps=of_adam["adam"] is not None)
        self._global_clip_norm = global_clip_norm
        here = join_world()
        members = process_set_of(process_group).members
        assert members.engine is not None
        name = here.name_optimizer(["ddp"], members.ranks)
        peers = Peers(here, members.engine, name, members.ranks, takes_part=True)
        self._bucket_exchanges = BucketExchanges(partial(self._open, name))
        super().__init__(peers, how, scaler, max_skipped_steps, optimizer, of_adam)
        self._replicas = HookReplicas(
            peers, self._steps.counted, self._bucket_exchanges, check_every, on_divergence
        )
        self._pending: list[PendingBucket] = []  # to be exchanged at the end of the pass
        # One thread, so that buckets end in order: the last one's task finds all before it done.
        self._finisher = ThreadPoolExecutor(1, "gtopk-ddp")
        self._failures: list[Exception] = []  # of the pass
        # Used by the engine's thread only: how many buckets the step has, 0: not known yet; and by
        # rank, DDP's numbers of buckets that are not finite.
        self._buckets = 0
        self._not_finite: dict[int, list[int]] = {}

    def _parameters(self) -> Collection[torch.Tensor]:
        return self._bucket_exchanges.parameters()

    def _residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        return self._bucket_exchanges.residuals()

    @property
    def divergences(self) -> int:
        """How many checks have found, and warned, that replicas differ."""
        return self._replicas.check.divergences

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to exchange a bucket; the future's value is its buffer with agreed gradients."""
        buffer = bucket.buffer()
        refuse_kinds(bucket)
        if not self._bucket_exchanges:
            refuse_another_group(bucket.parameters(), self._peers.ranks)
        refuse_another_model(bucket, self._bucket_exchanges)
        if not bucket.index():
            # An error in backward ends a pass without a word: only the next pass's first bucket
            # tells, and what the engine still has of the old one must not count for this one.
            self._abort_pass()
            self._passes.watch(bucket.parameters())
        bucket_exchange = self._bucket_exchanges.bucket_exchange_of(bucket.parameters(), buffer)
        # The exchange has one parameter, the whole bucket: its gradient is DDP's own memory, into
        # which the agreed entries are written without a copy.
        bucket_exchange.parameters[0].grad = buffer
        # Without its devices a future would not make DDP's stream wait for the exchange's.
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices or None)
        # Outside of a backward pass DDP.join calls: this rank has run out of batches, and shadows
        # the others' buckets with zeros.
        is_joined = torch._C._current_graph_task_id() == -1
        number, is_last = bucket.index(), bucket.is_last()
        pending = PendingBucket(bucket_exchange, number, is_last, is_joined, buffer, future)
        # Before the last bucket: the finisher goes by order, and so has noted what the comparison
        # found when DDP is told that this bucket, the last that it waits for, is done.
        if is_last and (comparison := self._replicas.begin(is_joined)) is not None:
            self._finisher.submit(self._replicas.end, comparison, self._failures)
        if self._global_clip_norm is None:
            self._begin(pending, 1.0)
        else:
            self._begin_clipped(pending)
        # DDP.join waits for the future itself, and no backward pass ends here to raise an error.
        if is_joined:
            return future.then(self._value_or_failure)
        # Not in the future: DDP would take the exception there for a tensor.
        after_backward(self._raise_failure)
        write_flat_gradients(bucket.parameters(), buffer)
        if is_last:
            after_backward(self._note_agreed)
        return future

    def _begin_clipped(self, pending: PendingBucket) -> None:
        """Keep a bucket until the pass's last one; then shorten all alike, and exchange them."""
        self._pending.append(pending)
        if not pending.is_last:
            return
        together, self._pending = self._pending, []
        clip = LocalClip(
            [each.buffer for each in together],
            None,
            loss_scale(self.scaler),
            allowed_mean=self._global_clip_norm,
            ratio=mean_square_ratio([each.bucket_exchange for each in together]),
        )
        # One factor for all buckets: it comes of the norm of the whole gradient.
        factor = self._steps.clip_factor = clip.factor(self._weight, self._weight)
        for each in together:
            self._begin(each, factor)

    def _begin(self, pending: PendingBucket, factor: float) -> None:
        """Begin to exchange a bucket; factor: multiplies its gradients."""
        buffer = pending.buffer
        operation = self._submit(
            f"bucket.{pending.number}",
            [
                f"{buffer.dtype} {list(buffer.shape)}",
                f"global_clip_norm={self._global_clip_norm}",
            ],
            pending.bucket_exchange,
            factor=factor,
            is_joined=pending.is_joined,
            flags=PREEMPTED if self._world.termination_requested else 0,
            then=partial(self._note_exchanged, pending.number, pending.is_last),
        )
        self._finisher.submit(self._finish, operation, pending)

    @property
    def global_clip_norm(self) -> float | None:
        """The norm that the mean gradient is shortened to; may be set, on all ranks alike."""
        return self._global_clip_norm

    @global_clip_norm.setter
    def global_clip_norm(self, norm: float | None) -> None:
        check_clip_norm(norm, makes_adam_steps=self.makes_adam_steps)
        self._global_clip_norm = norm

    def _note_exchanged(self, bucket: int, is_last: bool) -> None:
        """Note a bucket's outcome on the engine's thread, and end the transaction after the last.

        bucket: DDP's number of it; the last one may come before others.
        """
        for place in self._transaction.not_finite:
            self._not_finite.setdefault(self._peers.ranks[place], []).append(bucket)
        # DDP tells which bucket is its last, not how many there are; the last may be exchanged
        # first.
        self._buckets = bucket + 1 if is_last else self._buckets
        if len(self._transaction.ran) == self._buckets:
            self._close_pass()
            self._buckets = 0

    def _finish(self, operation: Operation, pending: PendingBucket) -> None:
        """Tell DDP that a bucket is done; an error is kept for `_raise_failure`."""
        try:
            operation.wait()
            # The finisher goes by order: all buckets before the last are done, too.
            if pending.is_last:
                self._steps.note_wait_end()
                self._world.note_preempted([*self._transaction.preempted])
                where = [
                    f"rank {rank} (of DDP's buckets: {', '.join(map(str, sorted(buckets)))})"
                    for rank, buckets in sorted(self._not_finite.items())
                ]
                self._not_finite = {}
                self._report_pass(overlapped=True, where=where)
        except Exception as error:
            self._failures.append(error)
        # On the exchange's stream, as a future makes its readers wait for the stream of this call.
        with pending.bucket_exchange.bucket.on_stream():
            pending.future.set_result(pending.buffer)

    def _raise_failure(self) -> None:
        """Raise the first error of the pass's buckets, if any; DDP has waited for all of them."""
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def _value_or_failure(self, done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self._raise_failure()
        return done.value()

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return this rank's residual of the model's parameters, by name, in their shapes.

        Save it on every rank, after `step`: what the pass has sent is in no parameter before. Or
        join all ranks' entries of "held" in one state, which any number of ranks can load.
        """
        return self._state_of(
            (name, self._bucket_exchanges.residual_of(p, is_trained=p.requires_grad))
            for name, p in named_parameters(model).items()
        )

    def gather_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return, on the first rank, the state with all ranks' residuals; that rank is to save it.

        All ranks call it together; the others get their own state. Any number of ranks can load it:
        no residual is lost.
        """
        state = self.state_dict(model)

        def work(transport: Transport, all_flags: list[int]) -> None:
            gather_held(state, self._rank, 0, transport)

        self._peers.run("state", [], work)
        return state

    def _abort_pass(self) -> None:
        """Undo a pass that an error has ended, if there is one, so that another may begin."""
        # An empty task: it runs after those that wait for the pass's buckets, so none of them
        # writes into the state that is cleared below.
        self._finisher.submit(int).result()
        super()._abort_pass()
        self._pending, self._buckets, self._failures, self._not_finite = [], 0, [], {}

    def load_state_dict(self, state: Mapping[str, Any], model: torch.nn.Module) -> None:
        """Replace the residual from the next step on; call it between steps only.

        A new process takes its first step in the buckets that DDP begins with, and density applies
        to each bucket. So the run goes on to the bit only if it was saved in the same buckets, as
        with find_unused_parameters or a single bucket. Nothing is lost in any case.
        Raises ValueError for a state of another format, and for tensors of other shapes.
        """
        named = named_parameters(model)
        # All that can raise comes first: a state that does not fit leaves the residual as it is.
        residuals = residuals_for(state, self._rank, self._ranks)
        residuals = under_known_names(residuals, named)
        require_shapes(residuals, named)
        why = "the model has no parameter of that name; give it the names that it was saved with"
        with self._loading(state, residuals, named.keys(), why):
            self._bucket_exchanges.put_residuals(
                {parameter: residuals.get(name, {}) for name, parameter in named.items()}
            )

    def stateful(self, model: torch.nn.Module) -> "Stateful":
        """Return an object for a framework's checkpoint: `state_dict()`, `load_state_dict(state)`.

        Its `state_dict()` is `gather_state(model)`: all ranks call it, and the first one saves it.
        """
        return Stateful(self, model)


class Stateful:
    """A hook's state with its model: has the `state_dict` and `load_state_dict` of frameworks."""

    def __init__(self, state: GTopKState, model: torch.nn.Module) -> None:
        self._state, self._model = state, model

    def state_dict(self) -> dict[str, Any]:
        return self._state.gather_state(self._model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.load_state_dict(state, self._model)


def state_for(optimizer: Any, density: float, **options: Any) -> GTopKState:
    """Return a hook's state for optimizers, plain or as a framework has wrapped them.

    optimizer: a single one, which is given to the state; or a sequence of several, which step with
        agreed gradients.
    """
    own = [*map(plain, optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    # The script's own optimizer=, None too, has precedence over the one that is found here.
    return GTopKState(density, **{"optimizer": own[0] if len(own) == 1 else None, **options})


def take_over_clipping(state: GTopKState, norm: float, option: str, instead: str) -> bool:
    """Let the state clip mean gradients to `norm` where a trainer would clip AdamW's steps.

    option: the trainer's, for an error. instead: how to leave it out, in words.
    Returns whether the state clips: the trainer must not clip then. Raises ValueError where the
    trainer would clip the steps of a correction, which the state cannot do in its place.
    """
    if state.compression.corrects:
        correction, way_out = "momentum", "let SGD take the momentum, after the clipping"
        if state.compression.adam_correction:
            correction, way_out = "adam", "use AdamW, whose moments come after the clipping"
        raise ValueError(
            f"with {correction}_correction gradients are steps with momentum by the time that they "
            f"would be clipped to {option}={norm:g}, and far longer: {instead}, or leave the "
            f"correction out and {way_out}"
        )
    if state.makes_adam_steps:
        state.global_clip_norm = norm
    return state.makes_adam_steps


def gtopk_hook(state: GTopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket's gradients by gTop-k; for DistributedDataParallel.register_comm_hook.

    The future's value is the bucket's buffer with the agreed entries of the mean over the ranks.
    Backward raises HorovodInternalError, on every rank, when the ranks disagree or one is gone.
    """
    if not isinstance(state, GTopKState):
        raise TypeError(f"register_comm_hook(state, gtopk_hook) needs a GTopKState, got {state!r}")
    return state.exchange(bucket)
