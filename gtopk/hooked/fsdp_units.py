"""Unit: a module that FSDP shards, and which of its parameters have a gradient in a pass.

FSDP hands its hook one vector, and does not say which parameters it is of:

    parameters    a     b     c         b has no gradient in this pass
    vector      [ a ][ c ]              each as long as its shard is on the first rank, padded
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..lanes.held import Held, fits


class Unit:
    """One of a model's sharded modules.

    group: FSDP's own, of the module's parameters; its `post_backward` is what calls the hook.
    modules: the names of the model's modules.
    stand_ins: by name, a tensor for each parameter: as long as its shard, without memory.
    with_gradient: the names of those that the vector is of that the hook has now.
    """

    def __init__(self, name: str, group: Any, modules: Mapping[torch.nn.Module, str]) -> None:
        self.name = name
        self.stand_ins: dict[str, torch.nn.Parameter] = {}
        self.with_gradient: list[str] = []
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

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The sharded parameters; the module itself may have whole ones in their place."""
        return [each.sharded_param for each in self._of.values()]

    def by_parameter(self, whole: Held) -> dict[str, Held]:
        """Return by parameter what is held back of the module as one, as earlier versions had it.

        Raises ValueError where that is not as long as all parameters that are trained.
        """
        trained = [name for name, each in self._of.items() if each.sharded_param.requires_grad]
        lengths = [self.stand_ins[name].numel() for name in trained]
        require_shape(self.name, whole, [sum(lengths)])
        found: dict[str, Held] = {}
        for what, vector in whole.items():
            for name, part in zip(trained, vector.split(lengths), strict=True):
                found.setdefault(name, {})[what] = part
        return found

    def _post_backward(self, *call: Any) -> None:
        self.with_gradient = [name for name, each in self._of.items() if self._has_gradient(each)]
        self._reduce(*call)

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


def require_shape(name: str, held: Held, shape: Sequence[int]) -> None:
    """Raise ValueError where what is held back has another."""
    for what, tensor in held.items():
        if not fits(what, tensor, shape):
            raise ValueError(
                f"the {what} of the shard of '{name}' has the shape {list(tensor.shape)}, but here "
                f"it is {list(shape)}"
            )
