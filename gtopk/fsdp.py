"""HSDP: replicas of a sharded model (fully_shard) exchange their shards' gradients with gTop-k.

    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    state = gtopk.fsdp.replicate(model, mesh["replicate"], density=0.001)

    ranks        0    1  |  2    3         0 and 1 share a replica, 2 and 3 another
    dense        0 <> 1  |  2 <> 3         FSDP's reduce-scatter, over fast links
    gTop-k       0 <> 2, 1 <> 3            each shard among its replicas, over slow links

    flags        0, 1, 2, 3                at the end of a pass: it counts for all shards, or none

The residual is sharded like the gradients, and so are AdamW's steps if the hook makes them. A
module's shard is exchanged as soon as FSDP has reduced it, while backward continues; the pass ends
when all shards are exchanged. Backward waits for shards that FSDP reads immediately: those that it
converts (reduce_dtype), divides (float16, float64), adds to gradients of an earlier pass, or copies
to the CPU, and those of parameters with post-accumulate hooks. Only parameters with a gradient take
part; the others keep their residual. Needs torch 2.7 or newer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    # Looked up here: torch 2.6 has the class, but not this method.
    _set_hook = FSDPModule.set_all_reduce_hook
except (ImportError, AttributeError) as missing:
    raise ImportError(f"gtopk.fsdp needs torch 2.7 or newer, got {torch.__version__}") from missing

from .compression import GTopK, Shards, SparseCompression
from .exchange.bucket_exchange import BucketExchange
from .exchange.buckets.parameters import refuse_complex, require_module
from .exchange.residual_state import ResidualState, validate_residual
from .integrations.fsdp_units import (
    Place,
    ShardGroups,
    Unit,
    place_in,
    require_all_sharded,
    require_outermost,
    residuals_of,
    units_of,
)
from .integrations.hook_state import HookState, compression_of, join_world, plain_optimizer
from .integrations.passes import BucketExchanges, HookReplicas, after_backward
from .optim.peers import Peers
from .optim.step_checks import MAX_SKIPPED_STEPS
from .optim.wrapped.adam_step import options_of_adam
from .optim.wrapped.checkpoint import check_part, residuals_for
from .optim.wrapped.local_residual import center_of, on_this_rank
from .reduce_ops import Average
from .runtime.coordinator import Operation
from .runtime.world import world

__all__ = ["ReplicaState", "replicate"]

_NO_CLIPPING: Final = (
    "FSDP hands over each module's gradients before the norm of all is known, so leave clipping out"
)


def replicate(
    model: torch.nn.Module,
    replicas: DeviceMesh,
    density: float = 0.001,
    *,
    compression: GTopK | Shards | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    adam_steps: Literal["before", "after"] = "before",
    local_residual: bool | None = None,
    scaler: Any = None,
    max_skipped_steps: int = MAX_SKIPPED_STEPS,
    ignored_params: Collection[torch.nn.Parameter] | None = None,
    **options: Any,
) -> ReplicaState:
    """Let the replicas of a sharded model exchange its gradients with gTop-k; all ranks call it.

    model: a model to which, or to whose modules, fully_shard was applied on a mesh of one
        dimension. On a mesh of two, FSDP itself would exchange gradients between replicas.
    replicas: the mesh, of one dimension, of the ranks that hold the same shard as this one.
    density: the density of every sharded module's gradients.
    optimizer: the optimizer of all the model's parameters. If it is torch's Adam or AdamW, each
        rank computes the steps of its shard and selects from them. They cannot be clipped then.
    compression, adam_steps, local_residual, scaler, max_skipped_steps, options: as in
        `gtopk.ddp.GTopKState`. Replicas are compared after the first step and every 100.
    ignored_params: those given to fully_shard. Nothing exchanges their gradients: average them over
        all ranks in the script.
    Joins the ranks (`hvd.init`) if nobody has yet. Raises ValueError for options out of range, for
    a model or mesh other than described, and for complex parameters; TypeError for an option that
    it does not have.
    """
    require_module(model)
    if not isinstance(replicas, DeviceMesh) or replicas.ndim != 1:
        raise ValueError(
            f"replicas must be a mesh of one dimension, as mesh['replicate'], got {replicas!r:.99}"
        )
    # Rejected by name: Compression.gtopk would only say that it has no such option.
    if options.pop("global_clip_norm", None) is not None:
        raise ValueError(
            f"global_clip_norm is not supported for replicas of a sharded model: {_NO_CLIPPING}"
        )
    refuse_complex(model.parameters(), {p: name for name, p in model.named_parameters()})
    chosen = compression_of("replicate", compression, density, options)
    optimizer = plain_optimizer(optimizer)
    adam_options = options_of_adam(optimizer, chosen, adam_steps, local_residual, Average)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("no module of the model is sharded: call fully_shard before replicate")
    # Only after the checks, so that a rejected model or mesh does not leave a world open.
    here = join_world()
    units = units_of(model)
    ignored = {*(ignored_params or ())}
    require_all_sharded(model, units.values(), ignored, here.rank)
    for unit in units.values():
        unit.require_sharded_only()
    place = place_in(replicas, [p for unit in units.values() for p in unit.parameters])
    state = ReplicaState(
        model,
        [*units.values()],
        place,
        chosen,
        scaler,
        max_skipped_steps,
        optimizer,
        adam_options,
        ignored,
    )
    # Set the hooks last: after an error above, the model still trains with FSDP alone.
    for module, unit in units.items():
        _set_hook(module, partial(state.exchange, unit))
    return state


class _Unfinished(NamedTuple):
    """An exchange that backward has not waited for yet; stream: its CUDA stream, on a GPU."""

    unit: Unit
    operation: Operation
    stream: torch.cuda.Stream | None


class _PassFlags:
    """The flags that ranks exchange at the end of a pass."""

    NOT_FINITE: Final = 1  # this rank's gradients are not finite
    VOID: Final = 2  # the pass does not count
    SPOILT: Final = 4  # some gradients that an earlier pass set to NaN still are
    CLEARED: Final = 8  # some of those gradients were cleared since

    @classmethod
    def is_void(cls, all_flags: Sequence[int]) -> bool:
        """Tell from all ranks' flags whether a pass is void.

        It is void if a rank sets VOID, or if gradients were added to an earlier pass's NaN and none
        was cleared. If some were cleared, the rest belong to no optimizer: they stay NaN but do not
        void further passes.
        """
        flags = functools.reduce(operator.or_, all_flags)
        return bool(flags & cls.VOID) or flags & (cls.SPOILT | cls.CLEARED) == cls.SPOILT


class ReplicaState(HookState):
    """The state of the replicas: the residual of each parameter's shard between steps.

    A step is one backward pass. To accumulate gradients over several passes, exchange them only in
    the last one. Before the others call model.set_requires_gradient_sync(False), which keeps whole
    gradients; or model.set_requires_all_reduce(False), with which FSDP reduces them within the
    replica, so that a rank keeps only its shard's sum. If instead every pass exchanges them, one
    void pass spoils the rest: gradients sent before it are lost, and later passes do not count
    until gradients are cleared.

    process_set: the ranks that hold the same shard.
    skipped_steps: as in `gtopk.ddp.GTopKState`, and the same for all shards. In such a step all of
        the model's gradients become NaN on all ranks.
    """

    _accumulation_hint: ClassVar[str] = "behind model.set_requires_gradient_sync(False)"
    _optimizer_hint: ClassVar[str] = (
        "give replicate the optimizer, replicate(..., optimizer=optimizer)"
    )
    _saving_hint: ClassVar[str] = (
        "Save state.state_dict() on every rank, and give that to load_state_dict of the state that "
        "replicate returns"
    )
    _clipping_hint: ClassVar[str] = _NO_CLIPPING

    def __init__(
        self,
        model: torch.nn.Module,
        units: Sequence[Unit],
        place: Place,
        compression: SparseCompression,
        scaler: Any,
        max_skipped_steps: int,
        optimizer: torch.optim.Optimizer | None = None,
        of_adam: Mapping[str, Any] | None = None,
        ignored: Collection[torch.Tensor] = (),
    ) -> None:
        self.process_set = place.replicas
        self._model, self._place, self._ignored = model, place, ignored
        self._bucket_exchanges = {
            unit: BucketExchanges(partial(self._open_bucket_exchange, unit)) for unit in units
        }
        here, ranks = world.current(), place.replicas.members.ranks
        name = here.name_optimizer(["fsdp"])
        peers = Peers(here, place.replicas.engine, name, ranks, takes_part=True)
        by_adam = of_adam or {"adam": None}
        super().__init__(peers, compression, scaler, max_skipped_steps, optimizer, by_adam)
        self._checks.ignored = ignored
        # Nothing broadcasts the model to the replicas, so they may differ from the start.
        self._replicas = HookReplicas(peers, self._steps.counted, self._centers)
        # Parameters whose gradients the last pass set to NaN.
        self._nonfinite: list[torch.Tensor] = []
        self._finite = True  # whether this rank's gradients in this pass are finite
        self._unfinished: list[_Unfinished] = []  # of this pass, in the same order on all ranks
        self._has_waited = False  # whether backward has waited for an exchange of this pass
        self._pass = -1  # autograd's number of the current pass

    def _parameters(self) -> set[torch.Tensor]:
        """Return the model's parameters, sharded and gathered ones: both may have gradients."""
        return {
            *(p for p in self._model.parameters() if p not in self._ignored),
            *(p for unit in self._bucket_exchanges for p in unit.parameters),
        }

    def _residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        return residuals_of(self._bucket_exchanges)

    def _centers(self) -> dict[torch.Tensor, str]:
        """Return this rank's shards as of the last step, with their parameters' names."""
        return {
            on_this_rank(center_of(unit.parameter(name))): name  # type: ignore[arg-type]
            for unit in self._bucket_exchanges
            for name in unit.stand_ins
        }

    def _groups_of(self, optimizer: torch.optim.Optimizer) -> ShardGroups:
        return ShardGroups(optimizer, self._bucket_exchanges)

    def _reshard(self) -> None:
        """Make FSDP gather the parameters again, as their shards have changed."""
        for unit in self._bucket_exchanges:
            unit.reshard()

    @property
    def _rank(self) -> int:
        """This rank's number when ranks are ordered replica by replica."""
        return self._peers.rank * self._place.shards + self._place.shard

    @property
    def _ranks(self) -> int:
        return self._place.all_ranks.size() or 1

    def exchange(self, unit: Unit, gradients: torch.Tensor) -> None:
        """Replace a replica's mean gradient, [shard's length], with the mean of all replicas."""
        if unit.accumulates:
            unit.accumulate(gradients)
            return
        unit.add_accumulated(gradients)
        self._passes.require_cleared(map(unit.parameter, unit.with_gradient))
        self._await_end_of_pass()
        # A module used twice in a pass has one residual: its first exchange must finish writing it.
        if any(each.unit is unit for each in self._unfinished):
            self._finish()
        names = unit.with_gradient
        bucket_exchange = self._bucket_exchanges[unit].bucket_exchange_of(
            [unit.stand_ins[name] for name in names], gradients
        )
        bucket_exchange.parameters[0].grad = gradients
        operation = self._submit(
            unit.name,
            [
                f"{gradients.dtype} {list(gradients.shape)}",
                f"gradients of {', '.join(names)}",
            ],
            bucket_exchange,
        )
        stream = torch.cuda.current_stream(gradients.device) if gradients.is_cuda else None
        self._unfinished.append(_Unfinished(unit, operation, stream))
        if not unit.is_only_viewed(gradients):
            self._finish()
            self._has_waited = True

    def _finish(self) -> None:
        """Wait for the unfinished exchanges of this pass."""
        while self._unfinished:
            _, operation, stream = self._unfinished.pop(0)
            self._finite &= operation.wait()
            # Only now has the engine enqueued the whole exchange on the stream.
            if stream is not None:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            if not self._unfinished:
                self._steps.note_wait_end()

    def _await_end_of_pass(self) -> None:
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            # A pass that an error has ended runs no callback; the changed number shows that one is
            # over.
            self._abort_pass()
            self._pass = number
            after_backward(self._end_pass)  # FSDP's own callbacks may hand over more gradients

    def _open_bucket_exchange(
        self, unit: Unit, whole: torch.nn.Parameter, parameters: Sequence[torch.Tensor]
    ) -> BucketExchange:
        return self._open(unit.name, whole, [unit.padded[unit.name_of(p)] for p in parameters])

    def _abort_pass(self) -> None:
        """Undo a pass that an error has ended, if there is one, so that another can begin.

        Waits for its exchanges, which write into gradients and residuals.
        """
        # Each error ends one `_finish`. Backward has already raised it or another one of this pass.
        while self._unfinished:
            with suppress(Exception):
                self._finish()
        super()._abort_pass()
        self._finite, self._has_waited = True, False

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Agree with all ranks on whether the step counts, and begin another."""
        require_outermost(self._model, self._world.rank)
        require_all_sharded(self._model, self._bucket_exchanges, self._ignored, self._world.rank)
        self._finish()
        if (comparison := self._replicas.begin()) is not None:
            self._replicas.check.end(comparison.wait(), {})
        all_ranks = self._place.all_ranks
        all_flags = all_ranks.engine.submit(
            f"{self._peers.name}.pass",
            [],
            lambda transport, all_flags: all_flags,
            flags=self._flags_of_pass(),
        ).wait()
        self._nonfinite, self._finite = [], True
        # Decided from all ranks' flags, so that all ranks drop their shards or none does.
        if _PassFlags.is_void(all_flags):
            self._transaction.drop()
            for parameter in self._parameters():
                if isinstance(parameter.grad, DTensor):
                    parameter.grad.to_local().fill_(torch.nan)
                    self._nonfinite.append(parameter)
        overlapped, self._has_waited = not self._has_waited, False
        ranks = zip(all_ranks.members.ranks, all_flags, strict=True)
        where = [f"rank {rank}" for rank, flags in ranks if flags & _PassFlags.NOT_FINITE]
        # The report raises after too many skipped steps. If the script goes on, its gradients must
        # still be noted as NaN, not as the last pass's agreed ones.
        try:
            self._close_pass()
            self._report_pass(overlapped, where)
        finally:
            self._note_agreed()

    def _flags_of_pass(self) -> int:
        """Return this rank's flags for the pass that ends."""
        flags = (_PassFlags.VOID if self._transaction.is_void else 0) | (
            0 if self._finite else _PassFlags.NOT_FINITE
        )
        for parameter in self._nonfinite:
            if not isinstance(parameter.grad, DTensor):
                flags |= _PassFlags.CLEARED
            elif (gradient := parameter.grad.to_local()).numel():
                flags |= _PassFlags.SPOILT if bool(gradient.isnan().any()) else _PassFlags.CLEARED
        return flags

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residual; save it on every rank, after `step`."""
        state = self._state_of(
            (
                (name, exchanges.residual_of(shard, is_trained=unit.parameter(name).requires_grad))
                for unit, exchanges in self._bucket_exchanges.items()
                for name, shard in unit.stand_ins.items()
            ),
            prefix=f"{self._place.shard}/",
        )
        return {**state, "shards": self._place.shards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the residual, from the next step on; call it only between steps.

        With another number of replicas but as many shards, the sum of the residuals is kept.
        Raises ValueError for a state with another format or other shards.
        """
        check_part(state)
        if state.get("shards") != self._place.shards:
            raise ValueError(
                f"the state was saved with {state.get('shards')} shards, but the model has "
                f"{self._place.shards}: load it with the same number of shards"
            )
        residuals: dict[str, ResidualState] = {}
        for key, parts in residuals_for(state, self._rank, self._ranks).items():
            number, _, name = key.partition("/")
            if int(number) != self._place.shard:
                raise ValueError(
                    f"the state has the residual of shard {number}, but this rank has shard "
                    f"{self._place.shard}: to change the number of replicas, use a mesh whose last "
                    "dimension is the shards, so that each replica has consecutive ranks"
                )
            residuals[name] = parts
        for unit in self._bucket_exchanges:
            # Earlier versions saved one residual per module, under the module's name.
            residuals.update(unit.by_parameter(residuals.pop(unit.name, {})))
            for name, shard in unit.stand_ins.items():
                rows = unit.padded[name].shape
                owner = f"the shard of '{name}'"
                validate_residual(owner, residuals.get(name, {}), shard.shape, rows)
        known = {name for unit in self._bucket_exchanges for name in unit.stand_ins}
        why = "the model has no sharded parameter of that name; shard the same ones as before"
        with self._loading(state, residuals, known, why):
            for unit, bucket_exchanges in self._bucket_exchanges.items():
                # Gradients accumulated before the load belong to other parameter values.
                unit.accumulated.clear()
                bucket_exchanges.put_residuals(
                    {shard: residuals.get(name, {}) for name, shard in unit.stand_ins.items()}
                )
