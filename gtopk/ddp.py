"""A communication hook for PyTorch's DistributedDataParallel: gTop-k instead of its allreduce.

    model = DistributedDataParallel(model)
    model.register_comm_hook(gtopk.ddp.GTopKState(density=0.001), gtopk.ddp.gtopk_hook)

    backward     |   a   |   b   |  c  |        DDP hands over a bucket when it is full
    engine               [   a   ] [ b ][ c ]   all ranks exchange it meanwhile
                                            ^   backward ends when every bucket is back

A bucket holds the residual of its parameters. DDP rebuilds its buckets after the first step (except
with find_unused_parameters); each parameter's residual then moves to its new bucket.

With find_unused_parameters, a parameter that no rank uses in a step still gets an update from the
residuals; if that update is zero, its .grad stays as DDP leaves it. A frozen parameter keeps its
residual until it is trained again.
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
from .exchange.residual_state import under_known_names, validate_residuals
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
from .optim.wrapped.checkpoint import gather_residuals, residuals_for
from .reduce_ops import Average
from .runtime.coordinator import Operation

__all__ = ["GTopKState", "gtopk_hook"]


class GTopKState(HookState):
    """The state of `gtopk_hook`: each parameter's residual between steps.

    Create one state per model; a step is one backward pass of that model.

    density: the density of every bucket; `options` are the other options of Compression.gtopk,
        which says how to tune them. With momentum_correction the optimizer's own momentum must be
        0, otherwise its first step raises an error; so does the first step of an Adam-like
        optimizer with adam_correction.
    compression: a Compression.gtopk or, for AdamW, Compression.shards, instead of density and
        options.
    optimizer: the optimizer of all the model's parameters. If it is torch's Adam or AdamW, the hook
        computes its steps and selects from them, as DistributedOptimizer does: once backward ends,
        gradients are the agreed steps, and `step` applies them. Others get agreed gradients.
    global_clip_norm: clip the mean gradient to about this norm before Adam's moments. Each rank
        clips its own gradient, with a ratio that it learns. Buckets are then exchanged only once
        the last one is full. With other optimizers, clip after backward instead.
    adam_steps: "before": select from Adam's steps; "after": the optimizer steps with agreed
        gradients.
    local_residual: whether forward passes in training include this rank's unsent Adam steps; None:
        yes. Parameters are equal on all ranks again after `step`, and in a model in eval mode.
    process_group: DDP's process group; None: all ranks. Any other group must also be a process set:
        hvd.init(process_sets=[hvd.ProcessSet(ranks)]).
    scaler: the GradScaler of the loss; the residual then survives changes of its scale.
    max_skipped_steps: how many consecutive steps may be skipped; one more raises FloatingPointError
        in the backward pass of every rank.
    check_every: compare hashes of the ranks' parameters in the second pass and then every
        check_every passes; 0: never; None: every 100.
    on_divergence: "warn" about the first parameter that differs, or "error": the backward pass
        raises HorovodInternalError on every rank. None: "error" if check_every is given, else
        "warn". divergences counts the checks that warned.
    skipped_steps: the number of steps in which some rank's gradient was not finite, or a sum
        exceeded float32. From the affected bucket on, gradients become NaN on every rank, so that a
        GradScaler sees it; each optimizer of the model skips such a step (`drop_skipped`), and the
        residual is restored. With float16 gradients, the part of a sum that exceeds float16 stays
        in the residual, and the step counts.
    Joins the ranks (`hvd.init`) if nobody has yet. Raises ValueError for options out of range and
    for a process group that is not a process set. The first backward pass raises it for complex
    parameters, sparse gradients, and a group other than DDP's. Cannot be pickled: save state_dict.
    """

    _accumulation_hint: ClassVar[str] = "within `with model.no_sync():`"
    _optimizer_hint: ClassVar[str] = (
        "give the hook's state the optimizer, GTopKState(optimizer=optimizer)"
    )
    _saving_hint: ClassVar[str] = (
        "Save model.module.state_dict() and state.state_dict(model), and give that to "
        "load_state_dict of a new GTopKState; average or copy model.module, not the DDP model"
    )
    _clipping_hint: ClassVar[str] = "GTopKState(global_clip_norm=) clips before the moments"

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
        chosen = compression_of("DDP's hook", compression, density, options)
        optimizer = plain_optimizer(optimizer)
        adam_options = options_of_adam(optimizer, chosen, adam_steps, local_residual, Average)
        check_clip_norm(global_clip_norm, makes_adam_steps=adam_options["adam"] is not None)
        self._global_clip_norm = global_clip_norm
        world = join_world()
        members = process_set_of(process_group).members
        assert members.engine is not None
        name = world.name_optimizer(["ddp"], members.ranks)
        peers = Peers(world, members.engine, name, members.ranks, takes_part=True)
        self._bucket_exchanges = BucketExchanges(partial(self._open, name))
        super().__init__(peers, chosen, scaler, max_skipped_steps, optimizer, adam_options)
        self._replicas = HookReplicas(
            peers,
            self._steps.counted,
            self._bucket_exchanges.centers,
            check_every,
            on_divergence,
        )
        self._pending: list[PendingBucket] = []  # clipped and exchanged at the end of the pass
        # A single thread, so that buckets finish in order: when the last one's task runs, all
        # others are done.
        self._finisher = ThreadPoolExecutor(1, "gtopk-ddp")
        self._failures: list[Exception] = []  # errors of this pass
        self._given = 0  # how many buckets DDP has passed in this backward pass
        self._expected: int | None = None  # how many it has; None: the last one was not passed yet
        # Only the engine's thread uses these two.
        self._buckets = 0  # how many buckets the step has; 0: not known yet
        self._not_finite: dict[int, list[int]] = {}  # by rank: DDP's numbers of those buckets

    def _parameters(self) -> Collection[torch.Tensor]:
        return self._bucket_exchanges.parameters()

    def _residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        return self._bucket_exchanges.residuals()

    @property
    def divergences(self) -> int:
        """How many checks found different replicas, and warned."""
        return self._replicas.check.divergences

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to exchange a bucket; the future's value is its buffer with agreed gradients."""
        buffer = bucket.buffer()
        refuse_kinds(bucket)
        if not self._bucket_exchanges:
            refuse_another_group(bucket.parameters(), self._peers.ranks)
        refuse_another_model(bucket, self._bucket_exchanges)
        if not bucket.index():
            # DDP does not report that an error ended the last pass. So abort an unfinished one at
            # the first bucket of the next: its leftovers must not count for this pass.
            self._abort_pass()
            self._passes.watch(bucket.parameters())
        bucket_exchange = self._bucket_exchanges.bucket_exchange_of(bucket.parameters(), buffer)
        # The exchange has a single parameter, the whole bucket. Its gradient is DDP's own memory,
        # so agreed entries need no copy.
        bucket_exchange.parameters[0].grad = buffer
        # Given the device, the future makes DDP's stream wait for the exchange's stream.
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices or None)
        # Outside a backward pass the caller is DDP.join: this rank has run out of batches and
        # contributes zeros to the others' buckets.
        is_joined = torch._C._current_graph_task_id() == -1
        number, is_last = bucket.index(), bucket.is_last()
        pending = PendingBucket(bucket_exchange, number, is_last, is_joined, buffer, future)
        # Submit the comparison before the last bucket: the finisher works in order, so its result
        # is noted by the time DDP, which waits for the last bucket, goes on.
        if is_last and (comparison := self._replicas.begin(is_joined)) is not None:
            self._finisher.submit(self._replicas.end, comparison, self._failures)
        if self._global_clip_norm is None:
            self._begin(pending, 1.0)
        else:
            self._begin_clipped(pending)
        # DDP.join waits for the future itself; no backward pass could raise the error.
        if is_joined:
            return future.then(self._value_or_failure)
        # Not through the future: DDP would take an exception there for a tensor.
        self._given += 1
        self._expected = number + 1 if is_last else self._expected
        after_backward(self._end_backward)
        write_flat_gradients(bucket.parameters(), buffer)
        if is_last:
            after_backward(self._note_agreed)
        return future

    def _begin_clipped(self, pending: PendingBucket) -> None:
        """Keep buckets until the pass's last one; then clip them together, and exchange them."""
        self._pending.append(pending)
        if not pending.is_last:
            return
        buckets, self._pending = self._pending, []
        clip = LocalClip(
            [each.buffer for each in buckets],
            None,
            loss_scale(self.scaler),
            allowed_mean=self._global_clip_norm,
            ratio=mean_square_ratio([each.bucket_exchange for each in buckets]),
        )
        # One factor for all buckets, from the norm of the whole gradient.
        factor = self._steps.clip_factor = clip.factor(self._weight, self._weight)
        for each in buckets:
            self._begin(each, factor)

    def _begin(self, pending: PendingBucket, factor: float) -> None:
        """Start to exchange a bucket, with its gradients multiplied by `factor`."""
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
            on_done=partial(self._note_exchanged, pending.number, pending.is_last),
        )
        self._finisher.submit(self._finish, operation, pending)

    @property
    def global_clip_norm(self) -> float | None:
        """The norm that the mean gradient is clipped to; may be changed, equally on all ranks."""
        return self._global_clip_norm

    @global_clip_norm.setter
    def global_clip_norm(self, norm: float | None) -> None:
        check_clip_norm(norm, makes_adam_steps=self.makes_adam_steps)
        self._global_clip_norm = norm

    def _note_exchanged(self, bucket: int, is_last: bool) -> None:
        """Note a bucket's result, on the engine's thread, and end the transaction after the last.

        bucket: DDP's number of the bucket.
        """
        for place in self._transaction.not_finite:
            self._not_finite.setdefault(self._peers.ranks[place], []).append(bucket)
        # DDP says only which bucket is its last, and that one may be exchanged before others.
        self._buckets = bucket + 1 if is_last else self._buckets
        if len(self._transaction.ran) == self._buckets:
            self._close_pass()
            self._buckets = 0

    def _finish(self, operation: Operation, pending: PendingBucket) -> None:
        """Tell DDP that a bucket is done; keep an error for `_raise_failure`."""
        try:
            operation.wait()
            # The finisher works in order: all other buckets are done, too.
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
        # On the exchange's stream: the future makes its readers wait for the current stream.
        with pending.bucket_exchange.bucket.on_stream():
            pending.future.set_result(pending.buffer)

    def _raise_failure(self) -> None:
        """Raise the first error of the pass's buckets, if any; DDP has waited for all of them."""
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def _end_backward(self) -> None:
        """Raise the pass's first error, or ValueError if DDP has left out a bucket.

        Called once for each bucket; the first call checks. A pass ends with DDP's last bucket.
        """
        given, expected = self._given, self._expected
        self._given, self._expected = 0, None
        self._raise_failure()
        if given and given != expected:
            raise ValueError(
                f"rank {self._world.rank}: DDP did not pass all of its buckets to the hook: "
                "create it without skip_all_reduce_unused_params=True"
            )

    def _value_or_failure(self, done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self._raise_failure()
        return done.value()

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return this rank's residual of each of the model's parameters, by name, in its shape.

        Save it on every rank, after `step`: before that, no parameter has the update that the pass
        has sent. Or merge all ranks' "held" entries into one state, which any number of ranks can
        load. Raises ValueError for another model than the hook's, such as a copy.
        """
        named, known = named_parameters(model), self._bucket_exchanges.parameters()
        if known and known.isdisjoint(named.values()):
            raise ValueError(
                f"rank {self._world.rank}: this GTopKState has the residuals of another model: "
                "give it the model that the hook is registered on, or that model's module, no copy"
            )
        return self._state_of(
            (name, self._bucket_exchanges.residual_of(p, is_trained=p.requires_grad))
            for name, p in named.items()
        )

    def gather_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state with all ranks' residuals on the first rank, which should save it.

        All ranks call it together; the other ranks get their own state. Any number of ranks can
        load the saved state without losing residuals.
        """
        state = self.state_dict(model)

        def work(transport: Transport, all_flags: list[int]) -> None:
            gather_residuals(state, self._rank, 0, transport)

        self._peers.run("state", [], work)
        return state

    def _abort_pass(self) -> None:
        """Undo a pass that an error has ended, if there is one, so that another can begin."""
        # Wait for an empty task: then no task of the pass is left that could write into the state
        # cleared below.
        self._finisher.submit(int).result()
        super()._abort_pass()
        self._pending, self._buckets, self._failures, self._not_finite = [], 0, [], {}
        self._given, self._expected = 0, None

    def load_state_dict(self, state: Mapping[str, Any], model: torch.nn.Module) -> None:
        """Replace the residual, from the next step on; call it only between steps.

        In a new process DDP's first step uses its initial buckets, and density applies per bucket.
        So the run continues bit for bit only if it was saved with the same buckets, as is the case
        with find_unused_parameters or a single bucket. No residual is lost in any case.
        Raises ValueError for a state with another format or with tensors of other shapes.
        """
        named = named_parameters(model)
        # Check everything first: a state that does not fit must leave the residual unchanged.
        residuals = residuals_for(state, self._rank, self._ranks)
        residuals = under_known_names(residuals, named)
        validate_residuals(residuals, named)
        why = "the model has no parameter of that name; use the names that it was saved with"
        with self._loading(state, residuals, named.keys(), why):
            self._bucket_exchanges.put_residuals(
                {parameter: residuals.get(name, {}) for name, parameter in named.items()}
            )

    def stateful(self, model: torch.nn.Module) -> "Stateful":
        """Return an object with `state_dict()` and `load_state_dict(state)` for a checkpoint.

        Its `state_dict()` is `gather_state(model)`: all ranks call it, and the first one saves it.
        """
        return Stateful(self, model)


class Stateful:
    """A hook's state bound to its model, with the methods that frameworks' checkpoints call."""

    def __init__(self, state: GTopKState, model: torch.nn.Module) -> None:
        self._state, self._model = state, model

    def state_dict(self) -> dict[str, Any]:
        return self._state.gather_state(self._model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.load_state_dict(state, self._model)


def state_for(optimizer: Any, density: float, **options: Any) -> GTopKState:
    """Return a hook's state for plain optimizers, or for optimizers that a framework has wrapped.

    optimizer: a single one, which is passed to the state; or a sequence of several, which step with
        agreed gradients.
    """
    own = [*map(plain, optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    # The script's own optimizer=, even None, takes precedence, as does its scaler=.
    return GTopKState(density, **{"optimizer": own[0] if len(own) == 1 else None, **options})


def take_over_clipping(state: GTopKState, norm: float, option: str, instead: str) -> bool:
    """Let the state clip mean gradients to `norm` where a trainer would clip AdamW's steps.

    option: the trainer's option, and instead: how to leave it out; both for the error.
    Returns whether the state clips; if so, the trainer must not. Raises ValueError with momentum
    correction or Adam correction: the trainer would clip their steps, and the state cannot.
    """
    if state.compression.corrects:
        correction, alternative = "momentum", "let SGD take the momentum, after the clipping"
        if state.compression.adam_correction:
            correction, alternative = "adam", "use AdamW, whose moments come after the clipping"
        raise ValueError(
            f"{option}={norm:g} is a norm for gradients, but with {correction}_correction it would "
            f"clip steps with momentum, which are far longer: {instead}, or leave the correction "
            f"out and {alternative}"
        )
    if state.makes_adam_steps:
        state.global_clip_norm = norm
    return state.makes_adam_steps


def gtopk_hook(state: GTopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket's gradients with gTop-k; for DistributedDataParallel.register_comm_hook.

    The future's value is the bucket's buffer with the agreed entries of the mean over the ranks.
    Backward raises HorovodInternalError on every rank if the ranks disagree or one is gone.
    """
    if not isinstance(state, GTopKState):
        raise TypeError(f"register_comm_hook(state, gtopk_hook) needs a GTopKState, got {state!r}")
    return state.exchange(bucket)
