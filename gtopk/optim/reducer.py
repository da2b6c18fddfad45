"""Reducer: exchange an optimizer's gradients, bucket by bucket, while backward runs.

first step   the order of gradients is not known yet: all ranks plan the buckets, then exchange
later        each bucket is submitted when its gradients are complete, the last one after backward
any time     a rank has a gradient that belongs to no bucket (a layer was added or unfrozen, or an
             embedding became sparse): the transaction is void, all ranks plan and exchange again
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from collectives.transports import Transport

from ..exchange.automatic import hides_behind_backward
from ..exchange.bucket_exchange import mean_square_ratio
from ..exchange.buckets.buckets import are_finite
from ..exchange.buckets.parameters import ParameterNames, with_gradients
from ..exchange.exchange import Progress
from ..exchange.residual_state import ResidualState
from ..reduce_ops import Average
from ..runtime.coordinator import Work
from ..runtime.coordinator.agreement import describe_missing
from ..runtime.logs import EVERYWHERE
from ..runtime.world import world
from ..runtime.world.membership import World
from ..telemetry.stragglers import Stragglers
from .expected_step import ExpectedStep
from .gradient_checks import loss_scale, refuse_ddp, require_scaler
from .hooks import BackwardHooks
from .options import Options
from .peers import Peers, peers_in, register_shadow
from .planned_buckets import PlannedBuckets
from .samples import LocalClip, Samples, note_stepper
from .step_transaction import StepTransaction

_log = logging.getLogger("gtopk")


class Overlap:
    """Whether buckets are exchanged before backward has ended; the last one never is.

    is_on: turned off once gradients, or weights, are changed between backward and the step.
    """

    def __init__(self, is_on: bool, compression: object) -> None:
        self.is_on = is_on
        self._hides = hides_behind_backward(compression)

    def stop(self, peers: Peers) -> None:
        """Exchange buckets after backward from now on, since gradients or weights change then."""
        if not self.is_on:
            return
        self.is_on = False
        _log.log(
            logging.WARNING if self._hides else logging.INFO,
            "rank %d: %s or their samples changed between backward() and step() (by clipping, for "
            "example): they are exchanged after backward from now on, without overlap%s; call "
            "optimizer.synchronize() before changing them%s",
            peers.world.rank,
            peers.name,
            ", and hide_behind_backward=True hides nothing" if self._hides else "",
            ", or give density= or bytes_per_step=" if self._hides else "",
            extra=EVERYWHERE,
        )

    def warn_of_a_single_bucket(self, buckets: int, peers: Peers) -> None:
        """Warn if hide_behind_backward is set with a single bucket, which cannot be hidden."""
        if self._hides and self.is_on and buckets == 1 and peers.size > 1:
            _log.warning(
                "rank %d: %s are exchanged in one bucket, after backward, so hide_behind_backward="
                "True hides nothing; use a smaller bucket_bytes=, or give density= or "
                "bytes_per_step=",
                peers.world.rank,
                peers.name,
                extra=EVERYWHERE,
            )


class Reducer:
    """Reduces an optimizer's gradients: call `exchange_gradients`, `apply`, then `commit`.

    names:    of all parameters; a new plan adds later ones.
    progress: steps and backward times, for the exchanges; `apply` counts the steps.
    planned:  the buckets that are exchanged.
    scaler:   the GradScaler that scales the loss, or None.
    samples:  the sample count of this rank's gradients; without one, `op` determines the weight.
    overlap:  whether buckets are exchanged during backward.
    expected: the predicted seconds of a step's exchange.
    stepping_mode: the mode of `adapt` that exchanges gradients instead of this reducer; "": none.
    peers:    the ranks that reduce together, in the current world.
    stragglers: how fast these ranks compute, compared with each other.
    """

    residual_of: ClassVar[str] = "gradients"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,  # the plain one; ours refers to this reducer
        names: ParameterNames,
        options: Options,
        here: World,
        scaler: Any,
    ) -> None:
        self.names = names
        self.options = options
        self.progress = Progress()
        self.planned = PlannedBuckets(names, options, self.progress)
        require_scaler(scaler)
        self.scaler = scaler
        self.samples = Samples()
        # SyncBatchNorm uses it to look up the weight of this rank's next gradients.
        note_stepper(self, names)
        self._clips_before = options.clips_before
        # The norm of all gradients is known only after backward.
        overlaps = options.overlap and not self._clips_before
        self.overlap = Overlap(overlaps, options.compression)
        is_planned = options.groups is None and options.bucket_bytes is None
        self.expected = ExpectedStep(options.compression, self.progress, is_planned=is_planned)
        self.stepping_mode = ""
        self._optimizer = optimizer
        self._transaction: StepTransaction | None = None
        # Its update is in the gradients, but no step has used it yet.
        self._applied: StepTransaction | None = None
        self._has_warned_of_lacking = False
        self._rolled_back = False  # whether the last applied transaction was
        # The other ranks', after this rank has joined; or its own, which it aborted.
        self._shadow: StepTransaction | None = None
        self.hooks = BackwardHooks(names, on_complete=self._submit_complete)
        self.enter(here)

    def enter(self, here: World) -> None:
        """Enter a world: the first, or the next one after `shutdown` or a failure.

        This rank keeps its residual, and the ranks plan again. Raises ValueError if the process
        set is not registered.
        """
        self._commit_or_roll_back()
        self.peers = peers_in(here, self.options.process_set, self.names.values())
        # `drop` waits for the old engine's thread, which may still be using the buckets.
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.drop()
        self.planned.drop_buckets()
        self.hooks.watch_buckets([])
        if self.peers.size > 1:
            self.hooks.watch(self.trained())
        self.stragglers = Stragglers(here, self.peers.engine, self.peers.name)
        register_shadow(self, self.peers.engine, self.peers.name)

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, looked up each time because loading a state replaces them."""
        return self._optimizer.param_groups

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters that may have a gradient, in the optimizer's order.

        Empty ones are left out: they have nothing to exchange.
        """
        return [p for p in with_gradients(self._param_groups) if p.numel()]

    def trains(self) -> bool:
        """Return whether `trained` is not empty; stops at the first parameter found."""
        return any(
            p.numel() and (p.requires_grad or p.grad is not None)
            for group in self._param_groups
            for p in group["params"]
        )

    @property
    def exchanges(self) -> bool:
        """Whether steps must be agreed with other ranks."""
        peers = self.peers
        return peers.takes_part and peers.size > 1 and not self.stepping_mode and self.trains()

    def stop_exchanging(self, mode: str) -> None:
        """Stop exchanging and counting passes, because this mode of `adapt` exchanges instead."""
        self.stepping_mode, self.overlap.is_on = mode, False
        self.hooks = BackwardHooks(self.names)  # watches nothing, and removes the old hooks

    def _submit_complete(self, index: int) -> None:
        """Exchange a bucket during backward, once its last gradient is complete."""
        if not self.overlap.is_on or index == len(self.planned.bucket_exchanges) - 1:
            return  # the last one ends the step, so `exchange_gradients` submits it
        if self.samples.count == 0:
            return  # gradients of no samples become zeros, but the number may still change
        parameters = self.planned.bucket_exchanges[index].parameters
        if any(p.is_cuda for p in parameters) and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph is being captured: it computes gradients later, without hooks
        if not self._is_current_world():
            return
        if self._transaction is not None and index in self._transaction.operations:
            return
        if not self.planned.accepts_gradients(parameters):
            return  # a gradient has become sparse: `exchange_gradients` plans again
        if self._transaction is None:
            self._transaction = self._open()
        self._transaction.submit_early(index)

    def _is_current_world(self) -> bool:
        """Return whether this is still the current world; the next step enters another."""
        return world.is_initialized() and world.current() is self.peers.world

    def exchange_gradients(self) -> StepTransaction:
        """Exchange all gradients; return the transaction, for the caller to apply or skip.

        Raises HorovodInternalError, on every rank alike, if the ranks disagree; residuals are then
        unchanged.
        """
        self._commit_or_roll_back()
        self.hooks.check()
        try:
            if self.hooks.began:
                self.progress.backward_seconds = self.hooks.seconds
                self.progress.backward_began = self.hooks.began
            order = self.hooks.order
        finally:
            self.hooks.forget()  # even if this fails, so that the next step counts
        # Reset it first: whatever fails below, the next step opens a transaction of its own.
        transaction, self._transaction = self._transaction, None
        if transaction is not None and transaction.samples != self.samples:  # set after backward
            transaction.invalidate()
        if not self.planned.bucket_exchanges:
            self._plan(order)
        # All ranks' flags decide whether a transaction is void, and why. So all ranks retry equally
        # often, and stop the overlap or plan again together.
        while True:
            transaction = transaction or self._open()
            self._finish(transaction)
            if not transaction.void:
                return transaction
            transaction.drop()
            if transaction.changed:
                self.overlap.stop(self.peers)
            if transaction.unplanned:
                self._plan(order)
            transaction = None

    def _plan(self, order: list[torch.nn.Parameter]) -> None:
        """Plan the buckets together with all ranks, and exchange them from now on."""
        trained = self.trained()
        self.names.add(self._param_groups)
        # Averaging a mean again changes nothing; but compressing after DDP saves nothing.
        if self.options.feedback is not None:
            refuse_ddp(trained)
        note_stepper(self, trained)
        self.planned.plan(trained, order, self.peers)
        bucket_exchanges = self.planned.bucket_exchanges
        if self.peers.size > 1:
            self.hooks.watch(trained)
        self.hooks.watch_buckets([each.parameters for each in bucket_exchanges])
        self.overlap.warn_of_a_single_bucket(len(bucket_exchanges), self.peers)
        self.expected.measure(bucket_exchanges, self.peers)

    def _finish(self, transaction: StepTransaction) -> None:
        here = self.peers.world
        try:
            transaction.finish(
                self.planned.is_outdated(self.trained()), preempted=here.termination_requested
            )
        except BaseException as error:
            if not isinstance(error, Exception):
                _log.warning(
                    "rank %d: interrupted (%s) mid-step; waiting for the other ranks to finish "
                    "it. Interrupt again to stop waiting.",
                    here.rank,
                    type(error).__name__,
                    extra=EVERYWHERE,
                )
            transaction.drop()
            raise
        here.note_preempted(transaction.preempted)
        self._warn_of_lacking(transaction.lacking)

    def _warn_of_lacking(self, lacking: Mapping[int, list[str]]) -> None:
        """Warn, once, of gradients that count as zeros on some ranks, as it may be a mistake."""
        if not lacking or self._has_warned_of_lacking:
            return
        self._has_warned_of_lacking = True
        _log.warning(
            "rank %d: at step %d some gradients are missing on some ranks, and count as zeros "
            "there, as with Horovod: %s; missing_gradients='error' makes it an error (logged once)",
            self.peers.world.rank,
            self.peers.world.step,
            describe_missing(lacking, most=3),
            extra=EVERYWHERE,
        )

    def apply(self, transaction: StepTransaction) -> None:
        """Replace the gradients with a transaction's update, and count the step."""
        transaction.apply()
        self._applied, self._rolled_back = transaction, False
        self.progress.steps += 1

    def commit(self) -> None:
        """Make the last applied update final: the optimizer has stepped with it."""
        if self._applied is not None:
            self._applied.commit()
            self._applied = None

    @property
    def is_discarded(self) -> bool:
        """Return whether the last applied update was dropped from the gradients without a step."""
        if (applied := self._applied) is None:
            return self._rolled_back
        return applied.is_discarded and not applied.has_changed_parameters

    def _commit_or_roll_back(self) -> None:
        # The gradients were cleared or replaced without a step: return the update to the residual.
        if self._applied is not None and self.is_discarded:
            self._roll_back()
        self.commit()

    def _roll_back(self) -> None:
        """Undo the exchange of the last applied update, unless a joined rank keeps it."""
        if self._applied is not None and not self._applied.some_joined:
            self._applied.undo()
            self._applied, self._rolled_back = None, True
            self.progress.steps -= 1

    def _open(self) -> StepTransaction:
        self._commit_or_roll_back()
        if self._shadow is not None:
            self._shadow.undo()  # in case it was not completed
            self._shadow = None
        weight = 1.0 / self.peers.size if self.options.op == Average else 1.0
        loss = loss_scale(self.scaler)
        clips_mean = self.options.adam is not None and self.options.global_clip_norm is not None
        clip = LocalClip(
            [p.grad for p in self.trained()] if self._clips_before else [],
            self.options.local_clip_norm,
            loss,
            allowed_mean=self.options.global_clip_norm if clips_mean else None,
            ratio=mean_square_ratio(self.planned.bucket_exchanges) if clips_mean else 1.0,
        )
        return StepTransaction(
            self.planned.bucket_exchanges,
            self.peers.engine,
            self.planned.signature,
            self.samples,
            missing_is_zero=self.options.missing_gradients == "zeros",
            weight=weight * clip.factor(weight, 1.0 / self.peers.size),
            scale=loss,
            predivide=self.options.gradient_predivide_factor,
            clip=clip,
        )

    def abort(self) -> None:
        """Leave this rank's current step, if any: the rank is about to join.

        The other ranks retry without its gradients; its residual is as before the step.
        """
        if self._transaction is not None:
            self._transaction.abort()
            self._shadow, self._transaction = self._transaction, None

    def shadow_work(self, index: int) -> Work:
        """Return this joined rank's work for a bucket of the other ranks' transaction."""
        here = self.peers.world
        if index >= len(self.planned.bucket_exchanges):
            raise RuntimeError(
                f"{self.peers.name} has no bucket {index} on rank {here.rank}, which has joined: "
                "every rank must take a step before one joins"
            )
        shadow = self._shadow
        # A bucket that is requested again belongs to the other ranks' retry.
        if shadow is None or index in shadow.shadowed:
            shadow = self._open()
        self._shadow = shadow
        reduce = shadow.shadow_work(index)

        def work(transport: Transport, all_flags: list[int]) -> None:
            # True, which counts as 1, if the step had an update: it counts on this rank, too.
            self.progress.steps += reduce(transport, all_flags)
            here.note_preempted(shadow.preempted)

        return work

    def drop(self) -> None:
        """Discard the gradients computed towards the next step.

        An update that no step has used is undone: the residual is as before it. All ranks do so
        alike; a rank that does not has a diverged replica anyway. Once a rank has joined, the
        update stays sent: that rank has sent its part, and does not learn that it was discarded.
        A transaction that has begun continues until the next step, because other ranks may be in
        it. It will be void, as the gradients will have changed by then.
        """
        if self._applied is not None and not self._applied.has_changed_parameters:
            self._roll_back()
        self.commit()
        self.hooks.forget()

    def drops_overflow(self) -> bool:
        """Return whether `drop` would discard complete but non-finite gradients on this rank."""
        if self.stepping_mode or not self.hooks.order or self.peers.size == 1:
            return False
        gradients = [p.grad for p in self.hooks.order if p.grad is not None]
        return not are_finite(gradients)

    def in_flight(self) -> dict[torch.nn.Parameter, Any]:
        """Return the operations of the buckets submitted so far in this step, by parameter."""
        if self._transaction is None:
            return {}
        return {
            parameter: operation
            for index, operation in self._transaction.operations.items()
            for parameter in self.planned.bucket_exchanges[index].parameters
        }

    def residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return each parameter with a residual, and the residual in the parameter's shape.

        Nothing while the optimizer is set aside: its residual waits until it is used again.
        """
        return iter(()) if self.hooks.is_aside else self.planned.residuals()

    @property
    def ranks(self) -> Sequence[int]:
        """Return the ranks of the world that reduce together, in order."""
        return self.peers.ranks

    @property
    def rank(self) -> int:
        """Return this rank's index among them."""
        return self.peers.rank

    @property
    def steps(self) -> int:
        """Return the number of steps taken, including those before the last loaded state."""
        # Leave out an applied update that no optimizer has used: it may still be undone.
        return self.planned.steps - (self._applied is not None)

    def parameter_names(self) -> set[str]:
        """Return the names of all parameters, including those that no step has used yet."""
        return self.names.all_names()

    def export_state(self) -> tuple[dict[str, ResidualState], list[dict[str, Any]]]:
        """Return each parameter's residual after the last step, and the buckets' records.

        An update that no step has used does not count: the parameters lack it, too.
        """
        if self._transaction is not None:
            # The engine's thread may be changing the residual.
            self._transaction.wait_for_operations()
        if self._applied is not None and self._applied.has_changed_parameters:
            self.commit()
        return self.planned.export_state()

    def import_state(
        self, residuals: Mapping[str, ResidualState], records: list[dict[str, Any]], steps: int
    ) -> None:
        """Replace the residuals and the step count; see `PlannedBuckets.import_state`."""
        if self._transaction is not None:
            # First, because the engine's thread may be using the residual.
            self._transaction.invalidate()
        self.commit()
        self.planned.import_state(residuals, records, steps)
