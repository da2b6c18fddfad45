"""An optimizer's parameters: their names, equal on all ranks, and checks of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

_SHOWN: Final = 4  # parameters that an error lists


class ParameterNames(dict[torch.nn.Parameter, str]):
    """Names of all parameters that an optimizer steps or has stepped, in order, without duplicates.

    user_names: the user's names, also of parameters that the optimizer may get later.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        user_names: Mapping[torch.nn.Parameter, str] | None = None,
    ) -> None:
        super().__init__()
        self._user_names = user_names or {}
        self.add(param_groups)

    def all_names(self) -> set[str]:
        """Return all names, including those of parameters that the optimizer does not step yet."""
        return {*self.values(), *self._user_names.values()}

    def add(self, param_groups: Iterable[dict[str, Any]]) -> None:
        """Name the parameters in the groups that have no name yet.

        Use the user's name if given, else the one in torch's optimizer, else one from its place.
        """
        taken = self.all_names()
        for i, group in enumerate(param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter in self:
                    continue
                name = self._user_names.get(parameter)
                if name is None:
                    # The user may have given torch's name to another parameter.
                    torch_names = group.get("param_names", ())
                    base = torch_names[j] if j < len(torch_names) else f"noname.{i}.{j}"
                    others = (f"{base}~{number}" for number in itertools.count(2))
                    name = next(n for n in itertools.chain([base], others) if n not in taken)
                    taken.add(name)
                self[parameter] = name


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> ParameterNames:
    """Return the name of every parameter the optimizer steps, in its order.

    Raises ValueError if names are duplicate or missing, or named_parameters has no pairs.
    """
    if named_parameters is None:
        return ParameterNames(optimizer.param_groups)
    # It may be a generator, and the pairs are needed several times. A module is not iterable.
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters must be pairs of a name and a parameter, as "
            "model.named_parameters() gives them"
        )
    counts = Counter(name for name, _ in pairs)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise ValueError(
            f"parameter names in named_parameters must be unique, but these come twice: "
            f"{', '.join(map(repr, duplicates))}; with several models, prefix the names"
        )
    named = {parameter: name for name, parameter in pairs}
    unnamed = [
        f"number {j} of group {i}, {list(p.shape)}"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if p not in named
    ]
    if unnamed:
        more = f"; and {len(unnamed) - _SHOWN} more" if len(unnamed) > _SHOWN else ""
        raise ValueError(
            "named_parameters was given, but the optimizer has parameters that are not in it: "
            f"{'; '.join(unnamed[:_SHOWN])}{more}; pass model.named_parameters() of the model that "
            "the optimizer steps"
        )
    return ParameterNames(optimizer.param_groups, named)


def describe_parameter(name: str, parameter: torch.Tensor) -> str:
    """Return a text about a parameter that must be equal on all ranks."""
    return f"parameter '{name}' {list(parameter.shape)} {parameter.dtype}"


def require_trained(names: Mapping[torch.nn.Parameter, str]) -> list[torch.nn.Parameter]:
    """Return the parameters that require a gradient.

    Raises ValueError if none does or all of them are empty, and for complex and lazy parameters.
    """
    trained = [parameter for parameter in names if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "a distributed optimizer needs a parameter that requires a gradient, and all "
            f"{len(names)} are frozen: unfreeze one (requires_grad_()), or step the plain optimizer"
        )
    # Check first: a lazy parameter has no size to read.
    refuse_complex(trained, names)
    refuse_lazy(trained, names)
    if not any(parameter.numel() for parameter in trained):
        raise ValueError(
            f"there is nothing to train: the {len(trained)} parameters that require a gradient "
            "are empty; create the optimizer after the model has its sizes"
        )
    return trained


ADAPT_TRAINS: Final = (
    "this mode of adapt trains the parameters that required a gradient when it began (unfreeze "
    "others before you call adapt)"
)


def refuse_new_parameters(
    param_groups: Iterable[dict[str, Any]], trained: Collection[torch.nn.Parameter], reason: str
) -> None:
    """Raise ValueError if a parameter outside the trained ones requires a gradient now.

    reason: start of the message: what trains them, since when, and what to do.
    """
    added = [
        f"number {j} of group {i}, {list(p.shape)}"
        for i, group in enumerate(param_groups)
        for j, p in enumerate(group["params"])
        if p.requires_grad and p not in trained
    ]
    if added:
        raise ValueError(f"{reason}, but now others do, too: {'; '.join(added)}")


def require_optimizer(optimizer: object, name: str = "optimizer") -> None:
    """Raise TypeError for an object that is not an optimizer, such as a list or a scheduler."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"{name} must be a torch.optim.Optimizer, such as AdamW, got {optimizer!r:.99}"
        )


def require_module(model: object) -> None:
    """Raise TypeError for an object that is not a torch.nn.Module, such as its state_dict."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r:.99}")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return all parameters, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained_by(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters that currently require a gradient, in their order."""
    return [p for p in parameters_of(optimizer) if p.requires_grad]


def with_gradients(param_groups: Iterable[dict[str, Any]]) -> list[torch.nn.Parameter]:
    """Return the parameters that may have a gradient, in their order.

    A parameter frozen after its backward pass keeps its gradient until that is cleared.
    """
    return [
        p
        for group in param_groups
        for p in group["params"]
        if p.requires_grad or p.grad is not None
    ]


def refuse_lazy(
    parameters: Iterable[torch.nn.Parameter], names: Mapping[torch.nn.Parameter, str]
) -> None:
    """Raise ValueError, naming the parameter, if one is lazy and has no size yet."""
    for parameter in parameters:
        if is_lazy(parameter):
            raise ValueError(
                f"parameter '{names[parameter]}' has no size yet: run a batch through the model's "
                "lazy modules before you create its optimizer"
            )


def refuse_complex(
    parameters: Iterable[torch.Tensor], names: Mapping[torch.nn.Parameter, str] | None = None
) -> None:
    """Raise ValueError, naming the parameter if it has a name, if one is complex."""
    for parameter in parameters:
        if parameter.is_complex():
            name = (names or {}).get(parameter, "")  # type: ignore[call-overload]
            raise ValueError(
                "complex parameters cannot be exchanged; keep real and imaginary part of "
                f"{repr(name) if name else 'this one'}, {parameter.dtype} {list(parameter.shape)}, "
                "as parameters (torch.view_as_real)"
            )
