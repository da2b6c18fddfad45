"""HookState: the state of a hook to which DDP or FSDP passes gradients bucket by bucket.

HookSteps: measures and reports each step. compression_of, plain_optimizer, join_world: check the
hook's arguments. `gtopk.ddp.GTopKState` and `gtopk.fsdp.ReplicaState` derive from HookState.

program   | backward    a     b     c |wait| optimizer ...      each bucket is passed to the hook;
engine                  [ a ] [ b ] [ c ]                       DDP waits after the last one
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from collectives.transports import Transport

from ..compression import GTopK, Shards, SparseCompression
from ..exchange.bucket_exchange import (
    BucketExchange,
    attach_adam,
    gradient_norm,
    open_bucket_exchange,
)
from ..exchange.exchange import Progress
from ..exchange.residual_state import ResidualState, unmatched
from ..optim.expected_step import ExpectedStep
from ..optim.gradient_checks import loss_scale, require_scaler
from ..optim.peers import Peers
from ..optim.step_transaction import NOT_FINITE
from ..optim.wrapped.adam_step import plain
from ..optim.wrapped.checkpoint import FORMAT
from ..optim.wrapped.wrapping import Wrapping
from ..runtime.coordinator import Operation
from ..runtime.world import world
from ..runtime.world.membership import World
from ..telemetry.run_record import note_step
from ..telemetry.step_report import StepReport, report
from ..telemetry.stragglers import Stragglers
from .adam import HookedAdam, HookGroups
from .optimizer_checks import HookSkips, OptimizerChecks, PassWatch
from .passes import PassTransaction


def compression_of(
    hook: str, compression: object, density: float, options: Mapping[str, Any]
) -> SparseCompression:
    """Return a hook's compression: the given one, or gTop-k by default.

    hook: its name in errors. options: for Compression.gtopk, besides the density.
    Raises ValueError for a compression together with options, for one that hooks do not support,
    and for per-parameter dense rules; also raises the errors of Compression.gtopk.
    """
    if compression is None:
        compression = GTopK(density, **options)
    # The hooks' default density is that of Compression.gtopk: any other one was set by the user.
    elif given_options := [*options, *(["density"] if density != GTopK.density else [])]:
        raise ValueError(
            "pass compression or the options of gTop-k, not both: got "
            f"{', '.join(sorted(given_options))} and {compression!r}"
        )
    if not isinstance(compression, GTopK | Shards):
        raise ValueError(
            f"{hook} takes Compression.gtopk(...) or Compression.shards(...), got "
            f"{compression!r}; DistributedOptimizer takes all of them"
        )
    if compression.dense or compression.dense_vectors or compression.dense_under:
        raise ValueError(
            f"{hook} exchanges whole buckets, so per-parameter dense rules are not supported; "
            "leave out dense, dense_vectors and dense_under"
        )
    return compression


class HookSteps:
    """Report each step, also to the run's record, and count the world's steps.

    After the first step, all ranks measure their links for predictions, while the program waits.

    last: the report of the last step; None before the first.
    counted: counts the steps that were not skipped.
    stragglers: how fast the ranks compute, compared with each other.
    clip_factor: the factor that clipped this rank's gradients in the step.
    """

    def __init__(self, peers: Peers, compression: Any, progress: Progress) -> None:
        """peers: the ranks that exchange together; progress: the caller counts its steps."""
        self._world, self._peers = peers.world, peers
        self.stragglers = Stragglers(peers.world, peers.engine, peers.name)
        self._expected = ExpectedStep(compression, progress)
        self._sizes: list[int] = []  # of the buckets in the prediction
        self.counted = Progress()
        self._waited_since: float | None = None
        self._waited_seconds = 0.0
        self._ended: float | None = None  # end of the last wait
        self._ended_before: float | None = None  # end of the previous step's last wait
        self.last: StepReport | None = None
        self.clip_factor = 1.0

    def note_submit(self) -> None:
        """Record the submission of a bucket, on the program's thread, which may now wait."""
        self._waited_since = time.perf_counter()

    def note_wait_end(self) -> None:
        """Record the end of the program's wait."""
        self._ended = time.perf_counter()
        if self._waited_since is not None:
            self._waited_seconds += self._ended - self._waited_since

    def close(self, ended_pass: PassTransaction, overlapped: bool) -> None:
        """Report a pass as a step; all ranks must call it after the same step.

        overlapped: the program waited only for the last bucket, not for each.
        """
        # First: measuring the links moves the end of the wait, which the report subtracts.
        bucket_exchanges = ended_pass.bucket_exchanges
        self._expect(bucket_exchanges)
        ended, before = self._ended or 0.0, self._ended_before
        waited_since, waited_seconds = self._last_wait(ended_pass)
        self.last = report(
            ended_pass,
            step=self._world.step,
            compute_seconds=max(0.0, ended - before - waited_seconds) if before else 0.0,
            # If backward waited for each bucket, it waited for all of the engine's work.
            waits=[(waited_since if overlapped else 0.0, math.inf)],
            waited_seconds=waited_seconds,
            expected=self._expected,
            skipped=ended_pass.is_void,
            gradient_norm=gradient_norm(bucket_exchanges, self.clip_factor),
        )
        self._waited_seconds, self._ended_before = 0.0, ended
        self._world.step += 1
        steps = None
        if not ended_pass.is_void:
            self.counted.steps += 1
            steps = self.counted.steps
            self.stragglers.note(steps, self.last.compute_seconds or None)
        note_step(self._world, self.last, steps, bucket_exchanges)

    def _last_wait(self, ended_pass: PassTransaction) -> tuple[float, float]:
        """Return when the program began to wait for the exchange last, and the seconds of all."""
        since = self._waited_since or 0.0
        # On a GPU it first waits for gradients that were only launched, which is computing.
        exchanged = ended_pass.exchanged.values()
        ready = [each.ready_at for each in exchanged if each.ready_at is not None]
        begun = max([since, *(min(each, self._ended or 0.0) for each in ready)])
        return begun, self._waited_seconds - (begun - since)

    def _expect(self, bucket_exchanges: Sequence[BucketExchange]) -> None:
        """Predict the exchange of the last step's buckets; measure links after the first step."""
        sizes = [bucket_exchange.elements for bucket_exchange in bucket_exchanges]
        # After the first step, because its buckets are not known until it has ended. Count the time
        # that measuring takes as waiting, not computing.
        if not self._sizes:
            begun = time.perf_counter()
            self._expected.measure(bucket_exchanges, self._peers)
            self._ended = time.perf_counter()
            self._waited_seconds += self._ended - begun
        elif sizes != self._sizes:
            self._expected.expect(bucket_exchanges)
        self._sizes = sizes


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer passed to a hook, unwrapped from a framework's wrapper.

    Raises ValueError for a distributed optimizer, TypeError for an object that is no optimizer.
    """
    if isinstance(optimizer, Wrapping):
        raise ValueError("the optimizer is distributed already: pass the plain one to the hook")
    return None if optimizer is None else plain(optimizer)


def join_world() -> World:
    """Return the world; initialize it if needed.

    Raises ValueError if torch.distributed gives this rank another number.
    """
    if not world.is_initialized():
        world.init()
    here = world.current()
    # Nodes, process sets and residuals use rank numbers: two numberings would silently mix them up.
    if torch.distributed.get_rank() != here.rank:
        raise ValueError(
            f"rank {torch.distributed.get_rank()} of torch.distributed is rank {here.rank} of "
            "gtopk: start the ranks with one launcher"
        )
    return here


class HookState(ABC):
    """The common part of DDP's and FSDP's hook states.

    A pass goes through `_submit`, bucket by bucket; `_close_pass`, once all are exchanged;
    `_report_pass`; and `_note_agreed`, when gradients are in place. `_abort_pass` precedes the next
    pass. A subclass must call `__init__` only when `_parameters` and `_residuals` work.

    compression, scaler: as passed. progress: the steps that counted.
    """

    # In messages: how a script accumulates passes, passes its optimizer to the hook, saves the
    # state, and clips if the hook computes Adam's steps.
    _accumulation_hint: ClassVar[str]
    _optimizer_hint: ClassVar[str]
    _saving_hint: ClassVar[str]
    _clipping_hint: ClassVar[str]

    def __init__(
        self,
        peers: Peers,
        compression: SparseCompression,
        scaler: Any,
        max_skipped_steps: int,
        optimizer: torch.optim.Optimizer | None,
        adam_options: Mapping[str, Any],
    ) -> None:
        """optimizer: that was passed to the hook. adam_options: its `options_of_adam`."""
        require_scaler(scaler)
        self.compression, self.scaler, self.progress = compression, scaler, Progress()
        self._world, self._peers = peers.world, peers
        self._weight = 1.0 / peers.size  # of this rank's gradients in the mean
        self._transaction = PassTransaction()
        self._steps = HookSteps(peers, compression, self.progress)
        self._skips = HookSkips(self._parameters, max_skipped_steps)
        # Residuals with names that no parameter has; they are saved again.
        self._unmatched: dict[str, ResidualState] = {}
        stepped = optimizer if adam_options["adam"] is not None else None
        made_by = compression.correction if stepped is None else "AdamW"
        self._passes = PassWatch(self._world.rank, made_by, self._accumulation_hint)
        self._adam: HookedAdam | None = None
        if stepped is not None:
            self._adam = HookedAdam(
                stepped,
                self._skips,
                peers,
                self._residuals,
                self._passes,
                local_residual=adam_options["local_residual"],
                groups=self._groups_of(stepped),
                swapped=self._reshard,
                clipping=self._clipping_hint,
            )
        self._checks = OptimizerChecks(
            self._skips,
            compression,
            self._world.rank,
            ranks=peers.ranks,
            logs_advice=self._rank == 0,
            hint=self._optimizer_hint if optimizer is None else "",
            stepped=stepped,
            adam="" if stepped is None else self._clipping_hint,
            residuals=self._residuals if stepped is None else None,
            retire=self.retire,
        )

    def retire(self) -> None:
        """Leave the model and the optimizer to other code, as when a trainer has ended.

        The residual stays.
        """
        self._checks.is_retired = True
        if self._adam is not None:
            self._adam.detach()

    @abstractmethod
    def _parameters(self) -> Collection[torch.Tensor]:
        """Return the model's parameters."""

    @abstractmethod
    def _residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each parameter with a residual, and a view of it in the parameter's shape."""

    def _groups_of(self, optimizer: torch.optim.Optimizer) -> HookGroups:
        """Return the groups of an optimizer that the hook computes the steps of."""
        return HookGroups(optimizer)

    def _reshard(self) -> None:  # noqa: B027  (FSDP alone overrides it)
        """Do what is needed after parameters change in place; nothing with DDP."""

    @property
    def _rank(self) -> int:
        """This rank's index among those that save their residuals as one state."""
        return self._peers.rank

    @property
    def _ranks(self) -> int:
        """The number of ranks that save their residuals as one state."""
        return self._peers.size

    @property
    def skipped_steps(self) -> int:
        """The number of steps that did not count; the same on all ranks."""
        return self._skips.count

    @property
    def last_step(self) -> StepReport | None:
        """The report of the last step; None before the first."""
        return self._steps.last

    @property
    def straggler_scores(self) -> list[float | None] | None:
        """The speed of each rank that exchanges with this one; the fastest is 1.

        From the last report; None before the first.
        """
        return self._steps.stragglers.scores

    @property
    def makes_adam_steps(self) -> bool:
        """Whether the hook computes the optimizer's steps, so that gradients are agreed steps."""
        return self._adam is not None

    def evaluating(self) -> AbstractContextManager[None]:
        """Within the context, set the parameters to the model that is the same on all ranks.

        They already are between `step` and the next forward pass, and for a model in eval mode:
        use this for code that reads them in the middle of a step.
        """
        return nullcontext() if self._adam is None else self._adam.evaluating()

    def drop_skipped(self, optimizer: torch.optim.Optimizer, *call: Any) -> None:
        """Drop an optimizer's gradients if the last backward pass does not count.

        Every optimizer of the model does this itself when `step` begins, and after a closure passed
        to `step`. An optimizer of several models then steps those with passes that count.
        """
        self._skips.drop(optimizer)

    def accept_gradients(self) -> None:
        """Accept the current gradients as the agreed steps, if the hook computes the steps."""
        self._note_gradients(is_repeated=True)

    def _note_gradients(self, *, is_repeated: bool) -> None:
        """is_repeated: they belong to a pass that was already recorded."""
        counted = self._skips.counted
        self._passes.note(self._skips.parameters() if counted else None)
        if self._adam is not None:
            self._adam.note(is_repeated=is_repeated) if counted else self._adam.forget()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError on a copy or a pickle; torch.save also pickles."""
        raise TypeError(
            f"a {type(self).__name__} can be neither copied nor pickled: it belongs to the ranks "
            f"of a running job. {self._saving_hint}"
        )

    def _open(
        self,
        name: str,
        whole: torch.nn.Parameter,
        members: Sequence[torch.Tensor],
    ) -> BucketExchange:
        """Create the exchange of a bucket that a parameter stands for.

        members: the tensors in it, which Adam's groups use to look them up.
        """
        bucket_exchange = open_bucket_exchange(
            name, [whole], [name], self.compression, self.progress, members=members
        )
        if self._adam is not None:
            groups = self._adam.groups
            attach_adam(bucket_exchange, self.compression, groups, self._peers.size)
        return bucket_exchange

    def _submit(
        self,
        name: str,
        signature: Sequence[str],
        bucket_exchange: BucketExchange,
        *,
        factor: float = 1.0,
        is_joined: bool = False,
        flags: int = 0,
        on_done: Callable[[], None] = lambda: None,
    ) -> Operation:
        """Start exchanging a bucket, with the gradients that are now in it.

        The operation returns whether this rank's gradients were finite. All ranks exchange buckets
        in the same order.

        factor: multiplies the gradients. is_joined: they are zeros without samples.
        on_done: called on the engine's thread, when the bucket is exchanged.
        """
        scale = loss_scale(self.scaler)
        bucket_exchange.capture_gradients(factor * self._weight / scale, scale)
        if is_joined:
            bucket_exchange.set_weight(bucket_exchange.bucket.weight, 0.0)
        transaction = self._transaction
        # On the program's thread, so that buckets are numbered in the order in which DDP passes
        # them.
        number = transaction.add(bucket_exchange)

        def work(transport: Transport, all_flags: list[int]) -> bool:
            is_finite = transaction.run(number, transport, all_flags)
            on_done()
            return is_finite

        if bucket_exchange.checks_finite_first and not bucket_exchange.all_finite():
            flags |= NOT_FINITE
        operation = self._peers.engine.submit(
            f"{self._peers.name}.{name}",
            [
                *signature,
                bucket_exchange.signature,
                f"{bucket_exchange.adam.frozen if bucket_exchange.adam else 0} frozen parameters",
                f"adam_steps={'before' if self.makes_adam_steps else 'after'}",
            ],
            work,
            flags=flags,
        )
        transaction.operations[number] = operation
        self._steps.note_submit()
        return operation

    def _close_pass(self) -> None:
        """End the transaction, once all buckets are exchanged."""
        self.progress.steps += self._transaction.close()

    def _report_pass(self, overlapped: bool, where: Iterable[str]) -> None:
        """Report the step, and warn if it does not count.

        overlapped: see `HookSteps.close`. where: the ranks with non-finite gradients.
        Raises FloatingPointError if more passes in a row did not count than allowed.
        """
        step, ended = self._world.step, self._transaction
        self._steps.close(ended, overlapped)
        # Otherwise a bucket has failed, and `_abort_pass` must undo the others.
        if ended.is_closed:
            self._transaction = PassTransaction()
        self._skips.note_pass(not ended.is_void, self._world.rank, step, " and ".join(where))

    def _note_agreed(self) -> None:
        """Record that the pass has ended and, if it counts, that gradients are agreed ones."""
        # First: restore parameters from an earlier hook's residual before they are used.
        self._checks.take_over()
        self._note_gradients(is_repeated=False)
        agreed = self._skips.parameters() if self._skips.counted else ()
        self._checks.corrected.agree(agreed, self.scaler)

    def _abort_pass(self) -> None:
        """Undo a pass that an error has ended, if any; its operations have ended."""
        self._transaction.drop()
        self._transaction.close()
        self._transaction = PassTransaction()

    def _state_of(
        self, residuals: Iterable[tuple[str, ResidualState]], prefix: str = ""
    ) -> dict[str, Any]:
        """Return this rank's state, with residuals by name; empty ones are left out.

        prefix: added to the names.
        """
        # An error may have ended the last pass: return what it took from the residual.
        self._abort_pass()
        self._skips.warn_of_saving(self._world.rank)
        # Residuals without a parameter, as after a change of the model, are saved again: a later
        # run may have their names.
        own = {name: parts for name, parts in (*self._unmatched.items(), *residuals) if parts}
        return {
            "format": FORMAT,
            "ranks": self._ranks,
            "steps": self.progress.steps,
            "lanes": [],
            "held": {self._rank: {prefix + name: parts for name, parts in own.items()}},
        }

    @contextmanager
    def _loading(
        self,
        state: Mapping[str, Any],
        residuals: Mapping[str, ResidualState],
        own_names: Collection[str],
        why: str,
    ) -> Iterator[None]:
        """Forget the last pass, and set the state's steps; load residuals within the context.

        why: the end of a warning: why residuals of unknown names cannot be loaded, and what to do.
        """
        self._unmatched = unmatched(residuals, own_names, self._world.rank, why)
        self._abort_pass()
        self._skips.note_loaded()
        if self._adam is not None:
            self._adam.forget()
        yield
        self.progress.steps = int(state["steps"])
        if self._adam is not None:
            self._adam.loaded()
