"""A communication hook for PyTorch's DistributedDataParallel: gTop-k in place of its allreduce.

    model = DistributedDataParallel(model)
    model.register_comm_hook(gtopk.ddp.GTopKState(density=0.001), gtopk.ddp.gtopk_hook)

    backward     |   a   |   b   |  c  |        DDP hands over a bucket when it is full
    engine               [   a   ] [ b ][ c ]   all ranks exchange it meanwhile
                                            ^   backward ends when every bucket is back

A bucket holds what was not sent of its parameters. DDP makes its buckets anew after the first step,
unless it is to find unused parameters: the residual moves along, parameter by parameter.

With find_unused_parameters a parameter that no rank uses in a step gets, as in any other, what is
sent of its residual; where that is nothing its .grad stays as DDP leaves it. The
residual of a frozen one waits until it is thawed.
"""

# DDP looks at the hook's annotations: they must be no strings.
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch._C._distributed_c10d import GradBucket, ProcessGroup

from collectives.transports import Transport

from .compression import GTopK, Shards
from .exchange.bucket_exchange import BucketExchange, make_adam_steps, open_bucket_exchange
from .exchange.buckets.parameters import refuse_complex
from .exchange.exchange import Progress
from .exchange.residual_names import under_known_names, unmatched
from .exchange.residual_state import ResidualState, mean_square_ratio
from .integrations.adam import HookedAdam, check_clip_norm
from .integrations.bucket_exchanges import BucketExchanges, compression_of
from .integrations.ddp_passes import (
    after_ddp,
    named_parameters,
    process_set_of,
    refuse_sparse,
    residuals_by_parameter,
    write_what_ddp_does_not,
)
from .integrations.frameworks import Stateful
from .integrations.hook_skips import HookSkips
from .integrations.hook_steps import HookSteps
from .integrations.one_step import NOT_FINITE, PREEMPTED, OneStep, flags_of
from .integrations.optimizer_checks import look_at_optimizers
from .optim.grad_scaler import loss_scale
from .optim.peers import Peers
from .optim.samples import LocalClip
from .optim.skip_counter import MAX_SKIPPED_STEPS
from .optim.wrapped.adam_step import options_of_adam, plain
from .optim.wrapped.checkpoint import FORMAT, gather_held, share_of
from .optim.wrapped.wrapping import Wrapping
from .reduce_ops import Average
from .runtime.coordinator import Operation
from .runtime.world import world
from .telemetry.step_report import StepReport

__all__ = ["GTopKState", "gtopk_hook"]


class _Handed(NamedTuple):
    """A bucket that DDP has handed over, whose future waits for what the ranks agree on."""

    bucket_exchange: BucketExchange
    number: int
    is_last: bool
    is_joined: bool  # this rank has: the gradients are zeros, and nobody's
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


class GTopKState:
    """What `gtopk_hook` keeps from step to step: of each parameter, what was not sent yet.

    Of one model: each needs a state of its own, and a step is one backward pass of that model.

    density: of every bucket; `options` are the others of Compression.gtopk.
        With momentum_correction the optimizer's own momentum must be 0: its first step is else an
        error, as it is of Adam and its kin with adam_correction.
    compression: a Compression.gtopk or Compression.shards, in place of density and options.
    optimizer: that steps all parameters of the model. Of torch's own Adam and AdamW the hook makes
        the steps, before it selects from them, as DistributedOptimizer does (`exchange.adamw`):
        from the end of backward on gradients are the agreed steps, and `step` applies them. Others
        step with agreed gradients. A step that does not count is dropped by itself.
    global_clip_norm: shortens the mean gradient before Adam's moments to about this norm: each
        rank shortens its own by a ratio that it learns. Buckets are then exchanged when the last
        one is full. With other optimizers clip after backward.
    adam_steps: "before" the selection, or "after": the optimizer steps with agreed gradients.
    local_residual: whether forward passes in training see Adam's steps that this rank has not sent
        yet (`wrapped.local_residual`); None: yes. Parameters are the same on all ranks again from
        `step` on, and in a model in eval mode.
    process_group: DDP's; None: of all ranks. Another one must be a process set, too:
        hvd.init(process_sets=[hvd.ProcessSet(ranks)]).
    scaler: the GradScaler that scales the loss, to keep the residual as it is when its scale
        changes.
    max_skipped_steps: how many steps in a row may be skipped: one more is a FloatingPointError of
        the backward pass, on every rank.
    skipped_steps: in how many steps a gradient was not finite on some rank, or a sum beyond
        float32. From the bucket on where that shows, gradients become NaN on every rank: GradScaler
        skips such a step; without one, optimizer.register_step_pre_hook(state.drop_skipped) does.
        Several optimizers need that on each, with a GradScaler, too: it skips only those that have
        a NaN. The residual is then as before the step. What a sum has beyond float16, of
        gradients in it, stays in the residual, and the step counts.
    Joins the ranks (`hvd.init`) where nobody has. Raises ValueError for options out of range, and
    for a process group that gtopk does not know; the first backward pass does for complex
    parameters and for sparse gradients. It can't be pickled: save its state_dict.
    """

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
        **options: Any,
    ) -> None:
        if isinstance(optimizer, Wrapping):
            raise ValueError("the optimizer is distributed already: give the state the plain one")
        optimizer = None if optimizer is None else plain(optimizer)
        self.compression = compression_of("DDP's hook", compression, density, options)
        of_adam = options_of_adam(optimizer, self.compression, adam_steps, local_residual, Average)
        check_clip_norm(global_clip_norm, makes_adam_steps=of_adam["adam"] is not None)
        self._global_clip_norm = global_clip_norm
        if not world.is_initialized():
            world.init()
        self._members = process_set_of(process_group).members
        assert self._members.engine is not None
        self._engine = self._members.engine
        self._rank = self._members.ranks.index(world.current().rank)
        self._name = world.current().name_optimizer(["ddp"], self._members.ranks)
        self.scaler = scaler
        self.progress = Progress()
        self._bucket_exchanges = BucketExchanges(self._open_bucket_exchange)
        self._skips = HookSkips(self._bucket_exchanges.parameters, max_skipped_steps)
        self._world = world.current()
        peers = Peers(self._world, self._engine, self._name, self._members.ranks, takes_part=True)
        self._adam: HookedAdam | None = None
        if optimizer is not None and of_adam["adam"] is not None:
            self._adam = HookedAdam(
                optimizer,
                self._skips,
                peers,
                self._bucket_exchanges.residuals,
                local_residual=of_adam["local_residual"],
            )
        elif optimizer is not None:
            optimizer.register_step_pre_hook(self.drop_skipped)
        self._clipping = look_at_optimizers(
            self._skips,
            self.compression,
            self._world.rank,
            says=self._rank == 0,
            way=""
            if optimizer is not None
            else "give the hook's state the optimizer, GTopKState(optimizer=optimizer)",
            stepped=None if self._adam is None else optimizer,
        )
        self._handed: list[_Handed] = []  # buckets of the pass that are to be exchanged at its end
        # Of names that no parameter has; saved again.
        self._unmatched: dict[str, ResidualState] = {}
        self._finisher = ThreadPoolExecutor(1, "gtopk-ddp")
        self._failures: list[Exception] = []  # of the pass
        self._step = OneStep()  # the engine's thread's own
        self._buckets = 0  # how many the step has; 0: not known yet
        # In the step, which ranks had SIGTERM: the engine's thread's own.
        self._preempted: set[int] = set()
        self._not_finite: dict[int, list[int]] = {}  # likewise, of which ranks, in which buckets
        self._counted = True
        self._steps = HookSteps(peers, self.compression, self.progress)

    @property
    def skipped_steps(self) -> int:
        """How many steps did not count."""
        return self._skips.skipped

    @property
    def last_step(self) -> StepReport | None:
        """What the last step cost; None before the first."""
        return self._steps.last

    @property
    def straggler_scores(self) -> list[float | None] | None:
        """How fast each rank computes beside the fastest, 1, as told last; None before."""
        return self._steps.stragglers.scores

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to replace a bucket's gradients by what all ranks agree on."""
        buffer = bucket.buffer()
        refuse_complex(bucket.parameters())
        refuse_sparse(bucket)
        self._refuse_another_model(bucket)
        if self._adam is not None and not bucket.index():
            self._adam.watch(bucket.parameters())
        bucket_exchange = self._bucket_exchanges.bucket_exchange_of(bucket.parameters(), buffer)
        bucket_exchange.parameters[0].grad = buffer
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices or None)
        is_joined = torch._C._current_graph_task_id() == -1  # by DDP.join
        handed = _Handed(
            bucket_exchange, bucket.index(), bucket.is_last(), is_joined, buffer, future
        )
        if self._global_clip_norm is None:
            self._submit(handed, 1.0)
        else:
            self._submit_clipped(handed)
        if is_joined:
            return future.then(self._value_or_failure)
        after_ddp(self._raise_failure)  # an exception in the future is to DDP no tensor
        write_what_ddp_does_not(bucket.parameters(), buffer)
        if bucket.is_last():
            after_ddp(self._end_pass)
        return future

    def _submit_clipped(self, handed: _Handed) -> None:
        """Exchange all buckets of a pass when the last one is there, shortened alike."""
        if not handed.number:
            self._handed.clear()  # of a pass that an error ended
        self._handed.append(handed)
        if not handed.is_last:
            return
        together, self._handed = self._handed, []
        clip = LocalClip(
            [each.buffer for each in together],
            None,
            loss_scale(self.scaler),
            allowed_mean=self._global_clip_norm,
            ratio=mean_square_ratio([each.bucket_exchange for each in together]),
        )
        weight = 1.0 / len(self._members.ranks)
        factor = clip.factor(weight, weight)
        for each in together:
            self._submit(each, factor)

    def _submit(self, handed: _Handed, factor: float) -> None:
        """Begin to exchange a bucket, whose gradients are to be multiplied with this factor."""
        bucket_exchange, buffer = handed.bucket_exchange, handed.buffer
        scale = loss_scale(self.scaler)
        bucket_exchange.take(factor / (len(self._members.ranks) * scale), scale)
        if handed.is_joined:
            bucket_exchange.weigh(bucket_exchange.bucket.weight, 0.0)
        number = self._steps.hand_over(bucket_exchange)
        preempted = PREEMPTED if self._world.termination_requested else 0
        operation = self._engine.submit(
            f"{self._name}.bucket.{handed.number}",
            [
                f"{buffer.dtype} {list(buffer.shape)}",
                bucket_exchange.signature,
                f"adam_steps={'before' if self.makes_adam_steps else 'after'}",
                f"global_clip_norm={self._global_clip_norm}",
            ],
            partial(self._work, bucket_exchange, number, handed.number, handed.is_last),
            flags=preempted | flags_of(bucket_exchange),
        )
        self._steps.submitted(number, operation)
        self._finisher.submit(
            self._finish, operation, bucket_exchange, buffer, handed.future, handed.is_last
        )

    def _end_pass(self) -> None:
        """Note, once DDP has written them, what gradients are that the ranks have agreed on."""
        self.accept_gradients()
        if self._skips.counted:
            self._clipping.agree(self._skips.parameters(), self.scaler)

    def accept_gradients(self) -> None:
        """Have the optimizer step by what gradients are now, where the hook makes its steps."""
        if self._adam is not None:
            (self._adam.note if self._skips.counted else self._adam.forget)()

    @property
    def makes_adam_steps(self) -> bool:
        """Whether the hook makes the optimizer's steps, so that gradients are agreed steps."""
        return self._adam is not None

    @property
    def global_clip_norm(self) -> float | None:
        """The norm that the mean gradient is shortened to; may be set anew, on all ranks alike."""
        return self._global_clip_norm

    @global_clip_norm.setter
    def global_clip_norm(self, norm: float | None) -> None:
        check_clip_norm(norm, makes_adam_steps=self.makes_adam_steps)
        self._global_clip_norm = norm

    def evaluating(self) -> AbstractContextManager[None]:
        """Let the parameters be the model that is the same on all ranks, within the context.

        They are that by themselves from `step` to the next forward pass, and in a model in eval
        mode: this is for what else looks at them in the middle of a step.
        """
        return nullcontext() if self._adam is None else self._adam.evaluating()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled, which torch.save of the DDP model does, too."""
        raise TypeError(
            "a GTopKState can be neither copied nor pickled: it belongs to the ranks of a running "
            "job. Save model.module.state_dict() and state.state_dict(model), and give that to "
            "load_state_dict of a new GTopKState; average or copy model.module, not the DDP model"
        )

    def _open_bucket_exchange(
        self, whole: torch.nn.Parameter, parameters: Sequence[torch.Tensor]
    ) -> BucketExchange:
        sizes = [parameter.numel() for parameter in parameters]
        bucket_exchange = open_bucket_exchange(
            self._name, [whole], ["bucket"], self.compression, self.progress, sizes=sizes
        )
        if self._adam is not None:
            ranks = len(self._members.ranks)
            make_adam_steps(
                bucket_exchange,
                self.compression,
                self._adam.groups,
                ranks,
                parameters=parameters,
            )
        return bucket_exchange

    def _refuse_another_model(self, bucket: GradBucket) -> None:
        """Only the first step has new parameters, and its buckets are numbered as they come."""
        if not self._bucket_exchanges.knows(bucket.parameters()) and bucket.index() != len(
            self._bucket_exchanges
        ):
            raise ValueError(
                "this GTopKState has the parameters of another model: use one GTopKState for each "
                "model (or, of one model whose parameters have several dtypes, static_graph=True, "
                "with which DDP does not number its first buckets: leave it out)"
            )

    def _work(
        self,
        bucket_exchange: BucketExchange,
        number: int,
        bucket: int,
        is_last: bool,
        transport: Transport,
        all_flags: list[int],
    ) -> None:
        """Run on the engine's thread, in an order that is equal on all ranks."""
        began = time.perf_counter()
        self._buckets = bucket + 1 if is_last else self._buckets
        for rank, flags in zip(self._members.ranks, all_flags, strict=True):
            if flags & PREEMPTED:
                self._preempted.add(rank)
            if flags & NOT_FINITE:
                self._not_finite.setdefault(rank, []).append(bucket)
        self._steps.ran(number, began, self._step.run(bucket_exchange, transport, all_flags))
        for place in self._step.not_finite:
            self._not_finite.setdefault(self._members.ranks[place], []).append(bucket)
        if self._step.buckets == self._buckets:
            self._counted = self._step.close()
            self._buckets = 0
            self.progress.steps += self._counted

    def _finish(
        self,
        operation: Operation,
        bucket_exchange: BucketExchange,
        buffer: torch.Tensor,
        future: torch.futures.Future[torch.Tensor],
        is_last: bool,
    ) -> None:
        """Tell DDP that a bucket is done; where it failed, `_raise_failure` says so."""
        try:
            operation.wait()
            if is_last:  # and so are all before it
                self._steps.arrived()
                step = self._world.step
                self._steps.close(self._counted, overlapped=True)
                self._world.note_preempted([*self._preempted])
                where = " and ".join(
                    f"rank {rank} (of DDP's buckets: {', '.join(map(str, sorted(buckets)))})"
                    for rank, buckets in sorted(self._not_finite.items())
                )
                self._not_finite = {}
                self._skips.note(self._counted, self._world.rank, step, where)
        except Exception as error:
            self._failures.append(error)
        with bucket_exchange.bucket.on_stream():
            future.set_result(buffer)

    def _raise_failure(self) -> None:
        """Raise why a bucket of the pass failed, if one did; DDP has waited for all of them."""
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def _value_or_failure(self, done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self._raise_failure()
        return done.value()

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return this rank's residual of the model's parameters, by name, in their shapes.

        Save it on every rank; or put the parts of all under "held" of one of them, which any number
        of ranks can load.
        """
        parts = {
            name: self._bucket_exchanges.residual_of(parameter, is_trained=parameter.requires_grad)
            for name, parameter in named_parameters(model)
        }
        residuals = {**self._unmatched, **{name: part for name, part in parts.items() if part}}
        return {
            "format": FORMAT,
            "ranks": len(self._members.ranks),
            "steps": self.progress.steps,
            "lanes": [],
            "held": {self._rank: residuals},
        }

    def gather_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state with the residuals of all ranks on the first, which is to save it.

        All ranks call it together; on the others it is this rank's own. Any number of ranks can
        load it: no residual is lost.
        """
        state = self.state_dict(model)

        def work(transport: Transport, all_flags: list[int]) -> None:
            gather_held(state, self._rank, 0, transport)

        self._engine.submit(f"{self._name}.state", [], work).wait()
        return state

    def drop_skipped(self, optimizer: torch.optim.Optimizer, *call: Any) -> None:
        """Drop an optimizer's gradients where the last backward pass does not count.

        For `register_step_pre_hook` of each optimizer, where no GradScaler skips such a step, or
        where there are several optimizers. One that is given closures is to be called with between
        a closure's backward and its end. One of several models takes those of all their states:
        the step is then one of the models whose passes count.
        """
        self._skips.drop(optimizer)

    def _break_off(self) -> None:
        """Make a pass void that an error has ended, whose first buckets are on their way."""
        self._finisher.submit(int).result()  # behind what waits for them
        if self._step.buckets:
            self._step.drop()
            self._step.close()
            self._steps.drop()
            self._buckets, self._failures, self._not_finite = 0, [], {}

    def load_state_dict(self, state: Mapping[str, Any], model: torch.nn.Module) -> None:
        """Hold back this from the next step on; between steps only.

        A new process takes its first step in the buckets that DDP begins with, and density holds in
        each: the run goes on to the bit where it was saved in the same ones, as with
        find_unused_parameters or where there is but one. Nothing is lost in any case.
        Raises ValueError for a state of another format, and for tensors of other shapes.
        """
        named = named_parameters(model)
        known = {name for name, _ in named}
        residuals = share_of(state, self._rank, len(self._members.ranks))
        residuals = under_known_names(residuals, known)
        found = residuals_by_parameter(residuals, named)
        self._unmatched = unmatched(
            residuals,
            known,
            self._world.rank,
            "the model has no parameter of that name; give it the names that it was saved with",
        )
        self._break_off()
        self._skips.end_row()
        if self._adam is not None:
            self._adam.forget()
        self._bucket_exchanges.put_residuals(found)
        self.progress.steps = int(state["steps"])
        if self._adam is not None:
            self._adam.loaded()

    def stateful(self, model: torch.nn.Module) -> Stateful:
        """Return what a framework's checkpoint can take: `state_dict()`, `load_state_dict(state)`.

        The former is `gather_state(model)`: all ranks call it, and the file is the first one's.
        """
        return Stateful(self, model)


def gtopk_hook(state: GTopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket's gradients by gTop-k; for DistributedDataParallel.register_comm_hook.

    The future's value is the bucket's buffer with the mean over the ranks of what they agreed on.
    Backward raises HorovodInternalError, on every rank, when the ranks disagree or one is gone.
    """
    return state.exchange(bucket)
