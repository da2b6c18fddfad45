"""Unit: a module that FSDP shards, and which of its parameters have a gradient in a pass.

FSDP passes one vector to its hook, without saying which parameters' gradients it contains:

    parameters    a     b     c         b has no gradient in this pass
    vector      [ a ][ c ]              each as long as its shard on the first rank, padded

ShardGroups: each rank computes AdamW's steps of its shard, together with the shard's replicas.
FSDP's optimizer has parameters and state as DTensors. The hook's vector has this rank's shard,
padded to the length of the first rank's:

    parameter    [11, 12]        rank 0 of two has [6, 12]    rank 1 has [5, 12]
    in a vector                                    [6, 12]    [6, 12], with a last row of zeros

Each shard has its own second moment, which its replicas share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard

from collectives.transports import Transport

from ..exchange.adamw import SHARED, SHARED_ROWS, Hyper, rows_of
from ..exchange.buckets.parameters import trained_by
from ..exchange.residual_state import ResidualState, plain_name, validate_residual
from ..optim.wrapped.local_residual import on_this_rank
from ..runtime.world import world
from ..runtime.world.process_sets import ProcessSet, find_or_register
from .adam import HookGroups
from .passes import BucketExchanges, stand_in


class Unit:
    """One of a model's sharded modules.

    group: FSDP's own, of the module's parameters; its `post_backward` calls the hook.
    modules: the names of the model's modules.
    stand_ins: by name, a tensor for each parameter, as long as its shard, without memory.
    padded: by name, a tensor without memory, of the shard's shape in the vector: the first rank's.
    with_gradient: the names of the parameters with gradients in the hook's current vector.
    accumulated: by name, the sum of gradients, as long as the shard, of passes that are not
        exchanged: model.set_requires_all_reduce(False).
    """

    def __init__(self, name: str, group: Any, modules: Mapping[torch.nn.Module, str]) -> None:
        self.name = name
        self.stand_ins: dict[str, torch.nn.Parameter] = {}
        self.padded: dict[str, torch.Tensor] = {}
        self.with_gradient: list[str] = []
        self.accumulated: dict[str, torch.Tensor] = {}
        self._group = group
        self._fsdp_params: dict[str, Any] = {}  # FSDP's own record of each parameter
        for each in group.fsdp_params:
            info = each._module_info
            full_name = ".".join(filter(None, (modules[info.module], info.param_name)))
            shape = each.padded_sharded_param_size
            one = torch.empty(1, dtype=each.sharded_param.dtype, device=group.device)
            self.stand_ins[full_name] = stand_in(one, shape.numel())
            self.padded[full_name] = torch.empty(shape, device="meta")
            self._fsdp_params[full_name] = each
        # Replace the method, because FSDP has no hook while gradients are still by parameter; it
        # looks the method up on each call.
        self._reduce = group.post_backward
        group.post_backward = self._post_backward

    def require_sharded_only(self) -> None:
        """Raise ValueError for gradients that FSDP itself reduces between replicas, and for copies.

        Copies are whole parameters on several ranks of a replica, as of norms with tensor
        parallelism: the ranks would select different entries of them, and the copies diverge.
        """
        info = self._group.mesh_info
        if info.replicate_mesh_dim is not None:
            raise ValueError(
                f"module '{self.name}' is replicated by FSDP itself, over {info.mesh}: its "
                "gradients would be exchanged twice, dense and by gTop-k. Shard it over one "
                "dimension, fully_shard(model, mesh=mesh['shard']), and pass the other to replicate"
            )
        for name in self._fsdp_params:
            parameter = self.parameter(name)
            mesh = parameter.device_mesh
            for dimension, placement in enumerate(parameter.placements):
                if placement.is_replicate() and mesh.size(dimension) > 1:
                    raise ValueError(
                        f"parameter '{name}' has copies on {mesh.size(dimension)} ranks of a "
                        f"replica ({list(parameter.placements)} over {mesh}), which would select "
                        "different entries: with tensor parallelism, shard every parameter over "
                        "its ranks, or leave it out"
                    )

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The sharded parameters; the module itself may have whole ones in their place."""
        return [each.sharded_param for each in self._fsdp_params.values()]

    @property
    def in_model(self) -> Iterator[torch.Tensor]:
        """The sharded parameters, and the gathered ones that the module may have in their place."""
        for each in self._fsdp_params.values():
            yield each.sharded_param
            if (gathered := getattr(each, "_unsharded_param", None)) is not None:
                yield gathered

    def parameter(self, name: str) -> DTensor:
        """Return the sharded parameter with this name."""
        sharded: DTensor = self._fsdp_params[name].sharded_param
        return sharded

    def name_of(self, stand_in: torch.Tensor) -> str:
        """Return the name of the parameter that a tensor stands for."""
        return next(name for name, each in self.stand_ins.items() if each is stand_in)

    def reshard(self) -> None:
        """Drop the gathered parameters, so that FSDP gathers the shards again."""
        self._group.reshard()

    @property
    def accumulates(self) -> bool:
        """Whether FSDP was told not to send this pass's gradients to the other replicas."""
        return not self._group.all_reduce_grads

    def is_only_viewed(self, gradients: torch.Tensor) -> bool:
        """Whether FSDP only creates views of this vector, and does not read it in this pass."""
        group = self._group
        return (
            gradients.dtype == group._orig_dtype
            # FSDP later divides gradients of other types.
            and gradients.dtype in (torch.float32, torch.bfloat16)
            and not getattr(group, "force_sum_reduction_for_comms", False)
            and not any(self._is_read(self._fsdp_params[name]) for name in self.with_gradient)
        )

    @staticmethod
    def _is_read(each: Any) -> bool:
        """Whether FSDP, or a hook, reads a parameter's gradient as soon as it is computed."""
        parameter = each.sharded_param
        return bool(
            parameter.grad is not None
            or each.offload_to_cpu
            or getattr(parameter, "_post_accumulate_grad_hooks", None)
        )

    def accumulate(self, gradients: torch.Tensor) -> None:
        """Add the vector to `accumulated`, and zero it."""
        for name, part in self._split(gradients):
            if name in self.accumulated:
                self.accumulated[name] += part
            else:
                self.accumulated[name] = part.clone()
        gradients.zero_()

    def add_accumulated(self, gradients: torch.Tensor) -> None:
        """Add `accumulated` to the vector; `_post_backward` ensures that it has all parameters."""
        for name, part in self._split(gradients):
            if name in self.accumulated:
                part += self.accumulated.pop(name)

    def _split(self, gradients: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        lengths = [self.stand_ins[name].numel() for name in self.with_gradient]
        return zip(self.with_gradient, gradients.split(lengths), strict=True)

    def by_parameter(self, whole: ResidualState) -> dict[str, ResidualState]:
        """Split a residual of the whole module, as saved by earlier versions, by parameter.

        Raises ValueError if it is not as long as all trained parameters together.
        """
        trained = [
            name for name, each in self._fsdp_params.items() if each.sharded_param.requires_grad
        ]
        lengths = [self.stand_ins[name].numel() for name in trained]
        validate_residual(f"the shard of '{self.name}'", whole, [sum(lengths)])
        found: dict[str, ResidualState] = {}
        for kind, vector in whole.items():
            for name, part in zip(trained, vector.split(lengths), strict=True):
                found.setdefault(name, {})[kind] = part
        return found

    def _post_backward(self, *call: Any) -> None:
        if not self._group.reduce_grads:
            self._reduce(*call)
            return
        if not self.accumulates:
            for name in self.accumulated:
                if not self._has_gradient(self._fsdp_params[name]):
                    # Exchange its gradient of earlier passes with this pass.
                    whole = self._fsdp_params[name].unsharded_param
                    whole.grad = torch.zeros_like(whole)
        # Before FSDP reduces: afterwards it has freed the gradients that show this.
        self.with_gradient = [
            name for name, each in self._fsdp_params.items() if self._has_gradient(each)
        ]
        none_before = [p for p in self.parameters if p.grad is None]
        self._reduce(*call)
        if self.accumulates:
            for parameter in none_before:
                # FSDP has created it from the zeros.
                parameter.grad = None

    def _has_gradient(self, parameter: Any) -> bool:
        """Return whether FSDP is about to reduce a gradient of this parameter."""
        # Not `unsharded_param`, which raises until the first forward pass has gathered it.
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is None:
            return False  # it has not been in a forward pass yet
        if getattr(self._group, "reduce_scatter_unused_params", False) and whole.requires_grad:
            return True
        return whole.grad is not None or parameter.unsharded_accumulated_grad is not None


def units_of(model: torch.nn.Module) -> dict[FSDPModule, Unit]:
    """Return the units by module; if several modules are sharded as one unit, by the last."""
    names = {module: plain_name(name) for name, module in model.named_modules()}
    modules = {}
    for module in names:
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # Later versions of torch have several groups per module: they take no hook, and
            # `replicate` raises.
            several = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if several is None else several:
                modules[group] = module
    return {
        module: Unit(names[module], group, names)
        for group, module in modules.items()
        if group is not None
    }


def require_outermost(model: torch.nn.Module, rank: int) -> None:
    """Raise RuntimeError in a nested backward pass: its end is not the end of the step."""
    context = next(m for m in model.modules() if isinstance(m, FSDPModule))
    state = context._get_fsdp_state()._state_ctx
    if getattr(state, "post_backward_final_callback_queued", False):
        raise RuntimeError(
            f"rank {rank}: a backward pass ran within another one, or after one that ended with "
            "an error: replicas do not know which of them ends a step. Checkpoint activations "
            "with use_reentrant=False; after an error call fully_shard on a new model"
        )


def require_all_sharded(
    model: torch.nn.Module, units: Iterable[Unit], ignored: Iterable[torch.Tensor], rank: int
) -> None:
    """Raise ValueError for a trained parameter that no unit has: nothing exchanges its gradient."""
    known = {*ignored, *(parameter for unit in units for parameter in unit.in_model)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in known:
            raise ValueError(
                f"rank {rank}: parameter '{plain_name(name)}' was not sharded when replicate was "
                "called, so its gradient would not be exchanged and replicas would differ: call "
                "fully_shard first, on modules with all trained parameters, then replicate; freeze "
                "this one; or average its gradient in the script, and pass it to both as "
                "ignored_params="
            )


class Place(NamedTuple):
    """This rank's place among the ranks that train the model.

    replicas: the ranks that hold its shard; all_ranks: those of all shards.
    shard: the number of its shard; shards: how many there are.
    """

    replicas: ProcessSet
    all_ranks: ProcessSet
    shard: int
    shards: int


def place_in(replicas: DeviceMesh, parameters: Iterable[torch.Tensor]) -> Place:
    """Return this rank's place and register all process sets; a collective."""
    here = world.current()
    same_shard = tuple(sorted(torch.distributed.get_process_group_ranks(replicas.get_group())))
    meshes = [p.device_mesh.mesh for p in parameters if isinstance(p, DTensor)]
    same_replica = tuple(sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()}))
    own_words = [" ".join(map(str, ranks)) for ranks in (same_shard, same_replica)]

    def gather(transport: Transport, all_flags: list[int]) -> list[list[str]]:
        return transport.gather_object(own_words)

    # If a rank is in both, gradients of different shards would be added up.
    if both := set(same_shard) & set(same_replica) - {here.rank}:
        raise ValueError(
            f"replicas must be the mesh of the ranks that hold the same shard, got that of ranks "
            f"{list(same_shard)}, but rank {here.rank} shares a replica with {sorted(both)}: pass "
            "the mesh dimension that fully_shard does not shard over"
        )
    if here.size > 1 and same_shard == same_replica:
        raise ValueError(
            f"rank {here.rank} holds the whole model and replicas has no other rank, so each rank "
            "would train a model of its own: pass the mesh dimension that fully_shard does not "
            "shard over"
        )
    gathered = here.engine.submit("fsdp.replicas", [], gather).wait()
    groups = [[tuple(map(int, ranks.split())) for ranks in words] for words in gathered]
    connected = [_connected_ranks(rank, groups) for rank in range(here.size)]
    needed = {each[0] for each in groups} | set(connected)
    # Registering is collective: all ranks register all sets, also other ranks', in the same order.
    found = {ranks: find_or_register(list(ranks)) for ranks in sorted(needed)}
    all_ranks = found[connected[here.rank]]
    return Place(found[same_shard], all_ranks, same_replica.index(here.rank), len(same_replica))


def _connected_ranks(rank: int, groups: Sequence[Sequence[tuple[int, ...]]]) -> tuple[int, ...]:
    """Return all ranks connected to this one by shared groups, directly or through others."""
    found = {rank}
    while more := {r for other in found for group in groups[other] for r in group} - found:
        found |= more
    return tuple(sorted(found))


class ShardGroups(HookGroups):
    """The groups of an optimizer of sharded parameters, looked up by the tensors of `Unit.padded`.

    Raises ValueError for an optimizer with other trained parameters: the hook does not compute
    their steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, units: Iterable[Unit]) -> None:
        super().__init__(optimizer)
        self._named = {shape: (unit, name) for unit in units for name, shape in unit.padded.items()}
        sharded = set(map(self._parameter, self._named))
        for parameter in trained_by(optimizer):
            if parameter not in sharded:
                raise ValueError(
                    f"the optimizer steps a parameter of shape {list(parameter.shape)} that "
                    "fully_shard has not sharded: create the optimizer after fully_shard, with "
                    "sharded parameters only (another one may step ignored_params), or pass "
                    "adam_steps='after'"
                )
        self._views: dict[torch.Tensor, dict[str, tuple[DTensor, torch.Tensor]]] = {}

    def _parameter(self, padded: torch.Tensor) -> DTensor:
        unit, name = self._named[padded]
        return unit.parameter(name)

    def read(self, parameters: Sequence[torch.Tensor]) -> list[Hyper | None]:
        """Return the options; raise ValueError for a parameter that the optimizer does not step."""
        return super().read([self._parameter(padded) for padded in parameters])

    def state_of(self, parameter: torch.Tensor) -> MutableMapping[str, Any]:
        """Return the optimizer's state of a parameter, as a mapping to this rank's shards."""
        sharded = self._parameter(parameter)
        views = self._views.setdefault(parameter, {})
        return _ShardState(super().state_of(sharded), sharded, parameter.shape, views)

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a parameter, padded."""
        return _padded(on_this_rank(self._parameter(parameter).detach()), parameter.shape)

    def initial_state(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a parameter's shared second moment and row sums before the first step."""
        shared, _ = super().initial_state(parameter)
        padded = next(each for each in self._named if self._parameter(each) is parameter)
        rows = torch.zeros(rows_of(padded), dtype=shared.dtype, device="cpu")
        assert isinstance(parameter, DTensor)
        return shared, _rows_of_all(rows, parameter)


class _ShardState(MutableMapping[str, Any]):
    """The state of a sharded parameter, as padded tensors of this rank's shard.

    views: by key, the DTensor that was stored, and the padded tensor that it is a view of.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        parameter: DTensor,
        padded: torch.Size,
        views: dict[str, tuple[DTensor, torch.Tensor]],
    ) -> None:
        self._state, self._parameter, self._shape, self._views = state, parameter, padded, views

    def __getitem__(self, key: str) -> Any:
        value = self._state[key]
        # load_state_dict may store other DTensors: the view is only valid for the one that was
        # stored here.
        own, whole = self._views.get(key, (None, None))
        if own is value:
            return whole
        if key == SHARED_ROWS or not isinstance(value, DTensor):
            return on_this_rank(value)
        return _padded(on_this_rank(value), self._shape)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == SHARED_ROWS:
            own = _rows_of_all(value, self._parameter)
        elif key == SHARED:
            own = _shard_of(value, self._parameter)
        else:
            self._state[key] = value
            return
        self._views[key] = own, value
        self._state[key] = own

    def __delitem__(self, key: str) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def residuals_of(
    bucket_exchanges: Mapping[Unit, BucketExchanges],
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each sharded parameter with a residual, and a view of it in its shard's shape."""
    for unit, exchanges in bucket_exchanges.items():
        for shard, residual in exchanges.residuals():
            parameter = unit.parameter(unit.name_of(shard))
            # The last shard may be shorter than the first, which sets the length in all vectors.
            shape = on_this_rank(parameter.detach()).shape
            yield parameter, residual[: shape.numel()].view(shape)  # type: ignore[misc]


def _padded(shard: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a shard with as many rows as the first rank's; added rows are zeros."""
    if shard.shape == shape:
        return shard
    padded = shard.new_zeros(shape)
    padded[: shard.shape[0]] = shard
    return padded


def _shard_of(padded: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return a DTensor like the parameter, with the memory of this rank's shard as local part."""
    own = padded[: on_this_rank(parameter.detach()).shape[0]]
    return _part_of(
        own, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    )


def _rows_of_all(rows: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return a DTensor of all shards' row sums, shard by shard, with these as the local part."""
    mesh = parameter.device_mesh
    return _part_of(rows, mesh, [Shard(0)], torch.Size([len(rows) * mesh.size()]), (1,))


@torch.no_grad()
def _part_of(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """Return a DTensor with this memory, on any device, as its part on this rank.

    `from_local` would copy row sums, which are on the host, to a GPU. And copy.deepcopy fails for a
    DTensor with a part that does not start where its storage does.
    """
    nothing = local.new_empty(local.shape, device="meta")
    like = DTensor.from_local(
        nothing, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    found = DTensor(torch.empty_like(local), like._spec, requires_grad=False)
    found._local_tensor = local
    return found
