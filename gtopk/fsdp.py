"""Replicas of a sharded model (fully_shard) exchange their shards' gradients by gTop-k (HSDP).

    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    state = gtopk.fsdp.replicate(model, mesh["replicate"], density=0.001)

    ranks        0    1  |  2    3         0 and 1 share a replica, 2 and 3 another
    dense        0 <> 1  |  2 <> 3         FSDP's reduce-scatter, over fast links
    gTop-k       0 <> 2, 1 <> 3            each shard among its replicas, over slow links

    flags        0, 1, 2, 3                at the end of a pass: it counts for all shards, or none

The residual is sharded as the gradients are, and so are AdamW's steps where they are made here. A
module's shard is exchanged as soon as FSDP has reduced it, while backward goes on; the pass ends
when all shards are exchanged. Backward waits for shards that FSDP itself reads at once: those that
it converts (reduce_dtype), divides (float16, float64), adds to gradients of an earlier pass, or
copies to the CPU, and those of parameters with post-accumulate hooks. Only parameters with a
gradient take part; the others keep their residual. Needs torch 2.7 or newer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    # Looked up here, as torch 2.6 has the class without the method.
    _set_hook = FSDPModule.set_all_reduce_hook
except (ImportError, AttributeError) as missing:
    raise ImportError(f"gtopk.fsdp needs torch 2.7 or newer, got {torch.__version__}") from missing

from .compression import GTopK, Shards, SparseCompression
from .exchange.bucket_exchange import BucketExchange
from .exchange.buckets.parameters import refuse_complex
from .exchange.residual_state import ResidualState, require_shape
from .integrations.fsdp_units import (
    Place,
    ShardGroups,
    Unit,
    place_in,
    require_outermost,
    residuals_of,
    units_of,
)
from .integrations.hook_state import HookState, compression_of, join_world, plain_optimizer
from .integrations.passes import BucketExchanges, after_backward
from .optim.peers import Peers
from .optim.step_checks import MAX_SKIPPED_STEPS
from .optim.wrapped.adam_step import options_of_adam
from .optim.wrapped.checkpoint import residuals_for
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
    **options: Any,
) -> ReplicaState:
    """Let the replicas of a sharded model exchange its gradients by gTop-k; all ranks call it.

    model: fully_shard was applied to it, or to modules in it, on a mesh of one dimension. On one
        of two, FSDP would exchange gradients between the replicas by itself, before gTop-k does.
    replicas: the mesh, of one dimension, of the ranks that hold the same shard as this one.
    density: of every sharded module's gradients.
    optimizer: steps all parameters of the model. For torch's own Adam and AdamW each rank makes the
        steps of its shard before it selects from them. They cannot be clipped then.
    All others are those of DDP's hook: see `gtopk.ddp.GTopKState`.
    Joins the ranks (`hvd.init`) where nobody has. Raises ValueError for options out of range, for
    another model or mesh than the above, and for complex parameters.
    """
    # Refused by name: Compression.gtopk would only say that it has no such option.
    if options.pop("global_clip_norm", None) is not None:
        raise ValueError(f"global_clip_norm is not for replicas of a sharded model: {_NO_CLIPPING}")
    refuse_complex(model.parameters(), {p: name for name, p in model.named_parameters()})
    how = compression_of("replicate", compression, density, options)
    optimizer = plain_optimizer(optimizer)
    of_adam = options_of_adam(optimizer, how, adam_steps, local_residual, Average)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("no module of the model is sharded: call fully_shard before replicate")
    if replicas.ndim != 1:
        raise ValueError(
            f"replicas must be a mesh of one dimension, as mesh['replicate'], got {replicas}"
        )
    # Only now: a model or a mesh that is refused above leaves no world behind.
    join_world()
    units = units_of(model)
    for unit in units.values():
        unit.require_sharded_only()
    place = place_in(replicas, [p for unit in units.values() for p in unit.parameters])
    state = ReplicaState(
        model, list(units.values()), place, how, scaler, max_skipped_steps, optimizer, of_adam
    )
    # The hooks last: had anything above raised, the model would still train as FSDP does.
    for module, unit in units.items():
        _set_hook(module, partial(state.exchange, unit))
    return state


class _Unfinished(NamedTuple):
    """An exchange that backward has not waited for yet; stream: that it runs on, on a GPU."""

    unit: Unit
    operation: Operation
    stream: torch.cuda.Stream | None


class _PassFlags:
    """The flags of the end of a pass."""

    NOT_FINITE: Final = 1  # this rank's gradients are not finite
    VOID: Final = 2  # the pass does not count
    SPOILT: Final = 4  # some gradients are still the NaN that an earlier pass made of them
    CLEARED: Final = 8  # some of those gradients were cleared since

    @classmethod
    def is_void(cls, all_flags: Sequence[int]) -> bool:
        """Tell whether a pass is void, from all ranks' flags.

        It is where a rank says VOID, or where gradients were added to an earlier pass's NaN and
        none was cleared. If some were cleared, the rest belong to no optimizer and stay NaN; they
        void no further pass.
        """
        said = functools.reduce(operator.or_, all_flags)
        return bool(said & cls.VOID) or said & (cls.SPOILT | cls.CLEARED) == cls.SPOILT


class ReplicaState(HookState):
    """The state of replicas from step to step: the residual of each parameter's shard.

    A step is one backward pass. To add up gradients over several passes, exchange them in the last
    one only. Before the others call model.set_requires_gradient_sync(False), which keeps gradients
    whole; or model.set_requires_all_reduce(False): FSDP then reduces them within the replica, and a
    rank keeps the sum of its shard alone. If each pass exchanges them, one that does not count
    spoils all: gradients sent before it are lost, and later passes do not count until gradients are
    cleared.

    process_set: the ranks that hold the same shard.
    skipped_steps: as of `gtopk.ddp.GTopKState`, and the same for all shards: in such a step all of
        the model's gradients become NaN on all ranks.
    """

    _accumulating: ClassVar[str] = "behind model.set_requires_gradient_sync(False)"
    _giving: ClassVar[str] = "give replicate the optimizer, replicate(..., optimizer=optimizer)"
    _saving: ClassVar[str] = (
        "Save state.state_dict() on every rank, and give that to load_state_dict of the state that "
        "replicate returns"
    )
    _clipping: ClassVar[str] = _NO_CLIPPING

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
    ) -> None:
        self.process_set = place.replicas
        self._model, self._place = model, place
        self._bucket_exchanges = {
            unit: BucketExchanges(partial(self._open_bucket_exchange, unit)) for unit in units
        }
        here, together = world.current(), place.replicas.members.ranks
        name = here.name_optimizer(["fsdp"])
        peers = Peers(here, place.replicas.engine, name, together, takes_part=True)
        by_adam = of_adam or {"adam": None}
        super().__init__(peers, compression, scaler, max_skipped_steps, optimizer, by_adam)
        self._nonfinite: list[torch.Tensor] = []  # the last pass made their gradients NaN
        self._finite = True  # this rank's gradients in the pass
        self._unfinished: list[_Unfinished] = []  # of this pass, in the same order on all ranks
        self._has_waited = False  # whether backward has waited for an exchange of this pass
        self._pass = -1  # autograd's number of the pass whose end is awaited

    def _parameters(self) -> set[torch.Tensor]:
        """Return the model's parameters, sharded and as gathered: both may have gradients."""
        return {
            *self._model.parameters(),
            *(p for unit in self._bucket_exchanges for p in unit.parameters),
        }

    def _residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        return residuals_of(self._bucket_exchanges)

    def _groups_of(self, optimizer: torch.optim.Optimizer) -> ShardGroups:
        return ShardGroups(optimizer, self._bucket_exchanges)

    def _reshard(self) -> None:
        """Let FSDP gather parameters anew whose shards have changed."""
        for unit in self._bucket_exchanges:
            unit.reshard()

    @property
    def _rank(self) -> int:
        """This rank's number, in an order where the ranks of a replica follow each other."""
        return self._peers.rank * self._place.shards + self._place.shard

    @property
    def _ranks(self) -> int:
        return self._place.everyone.size() or 1

    def exchange(self, unit: Unit, gradients: torch.Tensor) -> None:
        """Replace a replica's mean gradient, [shard's length], by that of all replicas."""
        if unit.is_to_accumulate:
            unit.accumulate(gradients)
            return
        unit.add_accumulated(gradients)
        self._passes.require_cleared(map(unit.parameter, unit.with_gradient))
        self._await_end_of_pass()
        # A module that is used twice in a pass has one residual, which its first exchange writes.
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
        if not unit.is_left_alone(gradients):
            self._finish()
            self._has_waited = True

    def _finish(self) -> None:
        """Wait for the exchanges of this pass that have not ended."""
        while self._unfinished:
            _, operation, stream = self._unfinished.pop(0)
            self._finite &= operation.wait()
            # Only after the wait: by then the engine has enqueued the whole exchange on the stream.
            if stream is not None:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            if not self._unfinished:
                self._steps.note_wait_end()

    def _await_end_of_pass(self) -> None:
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            # A pass that an error has ended runs no callback: the next one's number tells.
            self._abort_pass()
            self._pass = number
            after_backward(self._end_pass)  # FSDP's own callbacks may hand over more

    def _open_bucket_exchange(
        self, unit: Unit, whole: torch.nn.Parameter, parameters: Sequence[torch.Tensor]
    ) -> BucketExchange:
        return self._open(unit.name, whole, [unit.padded[unit.name_of(p)] for p in parameters])

    def _abort_pass(self) -> None:
        """Undo a pass that an error has ended, if there is one, so that another may begin.

        Waits for its exchanges: they write into gradients and residuals.
        """
        # Each error ends one `_finish`: backward has raised it, or another one of the same pass.
        while self._unfinished:
            with suppress(Exception):
                self._finish()
        super()._abort_pass()
        self._finite, self._has_waited = True, False

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Agree with all ranks on whether the step counts, and begin another."""
        require_outermost(self._model, self._world.rank)
        self._finish()
        everyone = self._place.everyone
        all_flags = everyone.engine.submit(
            f"{self._peers.name}.pass",
            [],
            lambda transport, all_flags: all_flags,
            flags=self._flags_of_pass(),
        ).wait()
        self._nonfinite, self._finite = [], True
        # From all ranks' flags: the shards of all ranks are dropped, or those of none.
        if _PassFlags.is_void(all_flags):
            self._transaction.drop()
            for parameter in self._parameters():
                if isinstance(parameter.grad, DTensor):
                    parameter.grad.to_local().fill_(torch.nan)
                    self._nonfinite.append(parameter)
        overlapped, self._has_waited = not self._has_waited, False
        ranks = zip(everyone.members.ranks, all_flags, strict=True)
        where = [f"rank {rank}" for rank, flags in ranks if flags & _PassFlags.NOT_FINITE]
        # The report raises after too many skipped steps; a script that goes on must still find its
        # gradients noted as NaN, not as the agreed ones of the pass before.
        try:
            self._close_pass()
            self._report_pass(overlapped, where)
        finally:
            self._note_agreed()

    def _flags_of_pass(self) -> int:
        """Return this rank's flags of the pass that ends."""
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
        """Replace the residual from the next step on; call it between steps only.

        On another number of replicas, with as many shards, the sum of the residuals stays.
        Raises ValueError for a state of another format, or of other shards.
        """
        if state.get("shards") != self._place.shards:
            raise ValueError(
                f"the state is of {state.get('shards')} shards, but here the model has "
                f"{self._place.shards}: the number of shards must be what it was"
            )
        residuals: dict[str, ResidualState] = {}
        for key, parts in residuals_for(state, self._rank, self._ranks).items():
            number, _, name = key.partition("/")
            if int(number) != self._place.shard:
                raise ValueError(
                    f"the state has the residual of shard {number}, but this rank has shard "
                    f"{self._place.shard}: on another number of replicas the ranks of each must "
                    "follow each other, as in a mesh whose last dimension is that of the shards"
                )
            residuals[name] = parts
        for unit in self._bucket_exchanges:
            # Earlier versions saved one residual a module, under the module's name.
            residuals.update(unit.by_parameter(residuals.pop(unit.name, {})))
            for name, shard in unit.stand_ins.items():
                rows = unit.padded[name].shape
                owner = f"the shard of '{name}'"
                require_shape(owner, residuals.get(name, {}), shard.shape, rows)
        known = {name for unit in self._bucket_exchanges for name in unit.stand_ins}
        why = "the model has no sharded parameter of that name; shard those that were"
        with self._loading(state, residuals, known, why):
            for unit, bucket_exchanges in self._bucket_exchanges.items():
                # Gradients of passes before the load are of other parameters than those that
                # follow.
                unit.accumulated.clear()
                bucket_exchanges.put_residuals(
                    {shard: residuals.get(name, {}) for name, shard in unit.stand_ins.items()}
                )
