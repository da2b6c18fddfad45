"""Unit: a module that FSDP shards, and which of its parameters have a gradient in a pass.

FSDP hands its hook one vector, and does not say which parameters it is of:

    parameters    a     b     c         b has no gradient in this pass
    vector      [ a ][ c ]              each as long as its shard is on the first rank, padded
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..exchange.residual_state import ResidualState, fits


class Unit:
    """One of a model's sharded modules.

    group: FSDP's own, of the module's parameters; its `post_backward` is what calls the hook.
    modules: the names of the model's modules.
    stand_ins: by name, a tensor for each parameter: as long as its shard, without memory.
    with_gradient: the names of those that the vector is of that the hook has now.
    accumulated: by name, the sum of the gradients, as long as its shard, of passes that were not to
        be exchanged: model.set_requires_all_reduce(False).
    """

    def __init__(self, name: str, group: Any, modules: Mapping[torch.nn.Module, str]) -> None:
        self.name = name
        self.stand_ins: dict[str, torch.nn.Parameter] = {}
        self.with_gradient: list[str] = []
        self.accumulated: dict[str, torch.Tensor] = {}
        self._group = group
        self._of: dict[str, Any] = {}  # FSDP's own record of each parameter
        for each in group.fsdp_params:
            info = each._module_info
            called = ".".join(filter(None, (modules[info.module], info.param_name)))
            length = each.padded_sharded_param_size.numel()
            self.stand_ins[called] = stand_in(torch.empty(1, device=group.device), length)
            self._of[called] = each
        self._reduce = group.post_backward
        group.post_backward = self._post_backward  # FSDP looks it up at each call

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

    @property
    def is_to_accumulate(self) -> bool:
        """Whether FSDP was told to keep the gradients of this pass from the other replicas."""
        return not self._group.all_reduce_grads

    def is_left_alone(self, gradients: torch.Tensor) -> bool:
        """Whether FSDP only makes views of this vector, and reads it no more in this pass."""
        group = self._group
        return (
            gradients.dtype == group._orig_dtype
            and gradients.dtype in (torch.float32, torch.bfloat16)  # it divides others
            and not getattr(group, "force_sum_reduction_for_comms", False)
            and not any(self._is_read(self._of[name]) for name in self.with_gradient)
        )

    @staticmethod
    def _is_read(each: Any) -> bool:
        """Whether FSDP, or a hook, reads a parameter's gradient as soon as it is there."""
        parameter = each.sharded_param
        return bool(
            parameter.grad is not None
            or each.offload_to_cpu
            or getattr(parameter, "_post_accumulate_grad_hooks", None)
        )

    def accumulate(self, gradients: torch.Tensor) -> None:
        """Add the vector to what is accumulated, and leave zeros in it."""
        for name, part in self._split(gradients):
            if name in self.accumulated:
                self.accumulated[name] += part
            else:
                self.accumulated[name] = part.clone()
        gradients.zero_()

    def add_accumulated(self, gradients: torch.Tensor) -> None:
        """Add what is accumulated to the vector, which `_post_backward` has all of it in."""
        for name, part in self._split(gradients):
            if name in self.accumulated:
                part += self.accumulated.pop(name)

    def _split(self, gradients: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        lengths = [self.stand_ins[name].numel() for name in self.with_gradient]
        return zip(self.with_gradient, gradients.split(lengths), strict=True)

    def by_parameter(self, whole: ResidualState) -> dict[str, ResidualState]:
        """Return by parameter the residual of the module as one, as earlier versions had it.

        Raises ValueError where that is not as long as all parameters that are trained.
        """
        trained = [name for name, each in self._of.items() if each.sharded_param.requires_grad]
        lengths = [self.stand_ins[name].numel() for name in trained]
        require_shape(self.name, whole, [sum(lengths)])
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
                    # Other passes gave it one, which is to be exchanged with this pass.
                    whole = self._of[name].unsharded_param
                    whole.grad = torch.zeros_like(whole)
        self.with_gradient = [name for name, each in self._of.items() if self._has_gradient(each)]
        none_before = [p for p in self.parameters if p.grad is None]
        self._reduce(*call)
        if self.is_to_accumulate:
            for parameter in none_before:
                parameter.grad = None  # FSDP made it of zeros

    def _has_gradient(self, parameter: Any) -> bool:
        """Tell whether FSDP is about to reduce a gradient of this parameter."""
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is None:
            return False  # it was in no forward pass yet
        if getattr(self._group, "reduce_scatter_unused_params", False) and whole.requires_grad:
            return True
        return whole.grad is not None or parameter.unsharded_accumulated_grad is not None


def stand_in(one: torch.Tensor, length: int) -> torch.nn.Parameter:
    """Return a parameter of this length, with no more memory than that of one element."""
    return torch.nn.Parameter(one.expand(length))


def require_shape(name: str, residuals: ResidualState, shape: Sequence[int]) -> None:
    """Raise ValueError where the residual has another."""
    for what, tensor in residuals.items():
        if not fits(what, tensor, shape):
            raise ValueError(
                f"the {what} of the shard of '{name}' has the shape {list(tensor.shape)}, but here "
                f"it is {list(shape)}"
            )
