"""Unit: a module that FSDP shards, and which of its parameters have a gradient in a pass.

FSDP hands its hook one vector, and does not say which parameters' gradients are in it:

    parameters    a     b     c         b has no gradient in this pass
    vector      [ a ][ c ]              each as long as its shard is on the first rank, padded
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from collectives.transports import Transport

from ..exchange.residual_state import ResidualState, plain_name, require_shape
from ..runtime.world import world
from ..runtime.world.process_sets import ProcessSet, find_or_register
from .bucket_exchanges import stand_in


class Unit:
    """One of a model's sharded modules.

    group: FSDP's own, of the module's parameters; its `post_backward` calls the hook.
    modules: the names of the model's modules.
    stand_ins: by name, a tensor for each parameter, as long as its shard, without memory.
    padded: by name, a tensor without memory of the shard's shape in the vector: the first rank's.
    with_gradient: the names of the parameters whose gradients are in the hook's current vector.
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
        self._of: dict[str, Any] = {}  # FSDP's own record of each parameter
        for each in group.fsdp_params:
            info = each._module_info
            called = ".".join(filter(None, (modules[info.module], info.param_name)))
            shape = each.padded_sharded_param_size
            one = torch.empty(1, dtype=each.sharded_param.dtype, device=group.device)
            self.stand_ins[called] = stand_in(one, shape.numel())
            self.padded[called] = torch.empty(shape, device="meta")
            self._of[called] = each
        # In place of the method, as FSDP has no hook where the gradients are still by parameter; it
        # looks the method up at each call.
        self._reduce = group.post_backward
        group.post_backward = self._post_backward

    def require_sharded_only(self) -> None:
        """Raise ValueError where FSDP itself reduces the gradients between replicas, too."""
        info = self._group.mesh_info
        if info.replicate_mesh_dim is not None:
            raise ValueError(
                f"module '{self.name}' is replicated by FSDP itself, over {info.mesh}: its "
                "gradients would be exchanged twice, dense and by gTop-k. Shard it over one "
                "dimension, fully_shard(model, mesh=mesh['shard']), and give replicate the other"
            )

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The sharded parameters; the module itself may have whole ones in their place."""
        return [each.sharded_param for each in self._of.values()]

    def parameter(self, name: str) -> DTensor:
        """Return the sharded parameter of a name."""
        sharded: DTensor = self._of[name].sharded_param
        return sharded

    def name_of(self, stand_in: torch.Tensor) -> str:
        """Return the name of the parameter that a tensor stands in for."""
        return next(name for name, each in self.stand_ins.items() if each is stand_in)

    def reshard(self) -> None:
        """Drop the gathered parameters, so that FSDP gathers the shards anew."""
        self._group.reshard()

    @property
    def is_to_accumulate(self) -> bool:
        """Whether FSDP was told to keep the gradients of this pass from the other replicas."""
        return not self._group.all_reduce_grads

    def is_left_alone(self, gradients: torch.Tensor) -> bool:
        """Whether FSDP only makes views of this vector, and does not read it again in this pass."""
        group = self._group
        return (
            gradients.dtype == group._orig_dtype
            # FSDP divides gradients of other types afterwards.
            and gradients.dtype in (torch.float32, torch.bfloat16)
            and not getattr(group, "force_sum_reduction_for_comms", False)
            and not any(self._is_read(self._of[name]) for name in self.with_gradient)
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
        """Add the vector to `accumulated`, and leave zeros in it."""
        for name, part in self._split(gradients):
            if name in self.accumulated:
                self.accumulated[name] += part
            else:
                self.accumulated[name] = part.clone()
        gradients.zero_()

    def add_accumulated(self, gradients: torch.Tensor) -> None:
        """Add `accumulated` to the vector; by `_post_backward` all its parameters are in it."""
        for name, part in self._split(gradients):
            if name in self.accumulated:
                part += self.accumulated.pop(name)

    def _split(self, gradients: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        lengths = [self.stand_ins[name].numel() for name in self.with_gradient]
        return zip(self.with_gradient, gradients.split(lengths), strict=True)

    def by_parameter(self, whole: ResidualState) -> dict[str, ResidualState]:
        """Return, by parameter, a residual of the whole module, as earlier versions saved it.

        Raises ValueError where it is not as long as all trained parameters together.
        """
        trained = [name for name, each in self._of.items() if each.sharded_param.requires_grad]
        lengths = [self.stand_ins[name].numel() for name in trained]
        require_shape(f"the shard of '{self.name}'", whole, [sum(lengths)])
        found: dict[str, ResidualState] = {}
        for what, vector in whole.items():
            for name, part in zip(trained, vector.split(lengths), strict=True):
                found.setdefault(name, {})[what] = part
        return found

    def _post_backward(self, *call: Any) -> None:
        if not self._group.reduce_grads:
            self._reduce(*call)
            return
        if not self.is_to_accumulate:
            for name in self.accumulated:
                if not self._has_gradient(self._of[name]):
                    # Its gradient of earlier passes is to be exchanged with this pass.
                    whole = self._of[name].unsharded_param
                    whole.grad = torch.zeros_like(whole)
        # Before FSDP reduces: afterwards it has freed the gradients that tell.
        self.with_gradient = [name for name, each in self._of.items() if self._has_gradient(each)]
        none_before = [p for p in self.parameters if p.grad is None]
        self._reduce(*call)
        if self.is_to_accumulate:
            for parameter in none_before:
                # FSDP has made it from the zeros.
                parameter.grad = None

    def _has_gradient(self, parameter: Any) -> bool:
        """Tell whether FSDP is about to reduce a gradient of this parameter."""
        # Not `unsharded_param`, which raises before the first forward pass has gathered it.
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is None:
            return False  # it was in no forward pass yet
        if getattr(self._group, "reduce_scatter_unused_params", False) and whole.requires_grad:
            return True
        return whole.grad is not None or parameter.unsharded_accumulated_grad is not None


def units_of(model: torch.nn.Module) -> dict[FSDPModule, Unit]:
    """Return the units by their modules; of several modules sharded as one unit, by the last."""
    names = {module: plain_name(name) for name, module in model.named_modules()}
    modules = {}
    for module in names:
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # Later versions of torch have several groups a module: they take no hook, and
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
    """Raise RuntimeError in a backward pass within another: its end is not the step's."""
    context = next(m for m in model.modules() if isinstance(m, FSDPModule))
    state = context._get_fsdp_state()._state_ctx
    if getattr(state, "post_backward_final_callback_queued", False):
        raise RuntimeError(
            f"rank {rank}: a backward pass within the backward pass, or after one that an error "
            "has ended: replicas do not know which of them ends a step. Checkpoint activations "
            "with use_reentrant=False; after an error make the model anew, by fully_shard"
        )


class Place(NamedTuple):
    """This rank's place among the ranks that train the model.

    replicas: the ranks that hold its shard; everyone: all ranks, of all shards.
    shard: the number of its shard; shards: how many there are.
    """

    replicas: ProcessSet
    everyone: ProcessSet
    shard: int
    shards: int


def place_in(replicas: DeviceMesh, parameters: Iterable[torch.Tensor]) -> Place:
    """Return this rank's place; all ranks call it together, and register all process sets."""
    here = world.current()
    alike = tuple(sorted(torch.distributed.get_process_group_ranks(replicas.get_group())))
    meshes = [p.device_mesh.mesh for p in parameters if isinstance(p, DTensor)]
    replica = tuple(sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()}))
    said = [" ".join(map(str, ranks)) for ranks in (alike, replica)]

    def gather(transport: Transport, all_flags: list[int]) -> list[list[str]]:
        return transport.gather_object(said)

    # With a rank that is in both, gradients of different shards would be added up.
    if both := set(alike) & set(replica) - {here.rank}:
        raise ValueError(
            f"replicas must be the mesh of the ranks that hold the same shard, got that of ranks "
            f"{list(alike)}, but rank {here.rank} shares a replica with {sorted(both)}: give the "
            "dimension of the mesh that fully_shard was not given"
        )
    told = here.engine.submit("fsdp.replicas", [], gather).wait()
    groups = [[tuple(map(int, ranks.split())) for ranks in words] for words in told]
    together = [_reached_from(rank, groups) for rank in range(here.size)]
    wanted = {each[0] for each in groups} | set(together)
    # Registering is collective: all ranks register all sets, in one order, also those of others.
    found = {ranks: find_or_register(list(ranks)) for ranks in sorted(wanted)}
    everyone = found[together[here.rank]]
    return Place(found[alike], everyone, replica.index(here.rank), len(replica))


def _reached_from(rank: int, groups: Sequence[Sequence[tuple[int, ...]]]) -> tuple[int, ...]:
    """Return the ranks that share a group with this one, or with one that does, and so on."""
    found = {rank}
    while more := {r for of in found for group in groups[of] for r in group} - found:
        found |= more
    return tuple(sorted(found))
