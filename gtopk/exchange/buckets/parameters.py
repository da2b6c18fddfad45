"""The names of an optimizer's parameters, equal on all ranks, and checks of the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, count
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from .placeholders import lacks_gradient


class ParameterNames(dict[torch.nn.Parameter, str]):
    """By parameter that an optimizer steps or has stepped, its name, in order; no name twice.

    given: names that the user has given, also of parameters that the optimizer may get later.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        given: Mapping[torch.nn.Parameter, str] | None = None,
    ) -> None:
        super().__init__()
        self._given = given or {}
        self.add(param_groups)

    def known(self) -> set[str]:
        """Return all names, with those of parameters that the optimizer does not step yet."""
        return {*self.values(), *self._given.values()}

    def add(self, param_groups: Iterable[dict[str, Any]]) -> None:
        """Name the parameters in the groups that have no name yet.

        By the user's names; else by those that torch's optimizer has; else by their places.
        """
        taken = self.known()
        for i, group in enumerate(param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter in self:
                    continue
                name = self._given.get(parameter)
                if name is None:
                    # torch's own name may be taken, by one that the user has given.
                    torchs = group.get("param_names", ())
                    base = torchs[j] if j < len(torchs) else f"noname.{i}.{j}"
                    others = (f"{base}~{number}" for number in count(2))
                    name = next(each for each in chain([base], others) if each not in taken)
                    taken.add(name)
                self[parameter] = name


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> ParameterNames:
    """Return the name of every parameter the optimizer steps, in its order.

    Raises ValueError when names are double or missing, or named_parameters has no pairs.
    """
    if named_parameters is None:
        return ParameterNames(optimizer.param_groups)
    # It may be a generator, and is gone through several times.
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters must be pairs of a name and a parameter, as "
            "model.named_parameters() gives them"
        )
    counts = Counter(name for name, _ in pairs)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"parameter names in named_parameters must be unique, but these come twice: "
            f"{', '.join(map(repr, twice))}; with several models, prefix the names"
        )
    named = {parameter: name for name, parameter in pairs}
    unnamed = [
        f"number {j} of group {i}, {list(p.shape)}"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if p not in named
    ]
    if unnamed:
        raise ValueError(
            "named_parameters was given, but the optimizer has parameters that are not in it: "
            f"{'; '.join(unnamed)}"
        )
    return ParameterNames(optimizer.param_groups, named)


def require_trained(names: Mapping[torch.nn.Parameter, str]) -> list[torch.nn.Parameter]:
    """Return the parameters that require a gradient.

    Raises ValueError where there is none, where all of them are empty, and for complex and lazy
    ones.
    """
    trained = [parameter for parameter in names if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "a distributed optimizer needs a parameter that requires a gradient, and all "
            f"{len(names)} are frozen: thaw one (requires_grad_()), or step the plain optimizer"
        )
    # Before sizes are read: a lazy parameter has none.
    refuse_complex(trained, names)
    refuse_lazy(trained, names)
    if not any(parameter.numel() for parameter in trained):
        raise ValueError(
            f"there is nothing to train: the {len(trained)} parameters that require a gradient "
            "hold no values; give the model its sizes before its optimizer"
        )
    return trained


KNOWN_TO_ADAPT: Final = (
    "this mode of adapt (thaw before you call it) trains the parameters that required a gradient "
    "when it began"
)


def require_known(
    param_groups: Iterable[dict[str, Any]], known: Collection[torch.nn.Parameter], what: str
) -> None:
    """Raise ValueError where a parameter requires a gradient by now that is not among the known.

    what: begins the message: what trains the known ones, since when, and what to do.
    """
    later = [
        f"number {j} of group {i}, {list(p.shape)}"
        for i, group in enumerate(param_groups)
        for j, p in enumerate(group["params"])
        if p.requires_grad and p not in known
    ]
    if later:
        raise ValueError(f"{what}, but now others do, too: {'; '.join(later)}")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return all parameters, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained_by(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters that require a gradient by now, in their order."""
    return [p for p in parameters_of(optimizer) if p.requires_grad]


def with_gradients(param_groups: Iterable[dict[str, Any]]) -> list[torch.nn.Parameter]:
    """Return the parameters that may have a gradient, in their order.

    One that was frozen after its backward pass keeps its gradient until that is cleared.
    """
    return [
        p
        for group in param_groups
        for p in group["params"]
        if p.requires_grad or not lacks_gradient(p)
    ]


def refuse_lazy(
    parameters: Iterable[torch.nn.Parameter], names: Mapping[torch.nn.Parameter, str]
) -> None:
    """Raise ValueError, with its name, for a parameter that has no size yet."""
    for parameter in parameters:
        if is_lazy(parameter):
            raise ValueError(
                f"parameter '{names[parameter]}' has no size yet: have a batch pass through the "
                "lazy modules of the model before you make its optimizer"
            )


def refuse_complex(
    parameters: Iterable[torch.Tensor], names: Mapping[torch.nn.Parameter, str] | None = None
) -> None:
    """Raise ValueError, with its name where it has one, for a parameter of complex numbers."""
    for parameter in parameters:
        if parameter.is_complex():
            name = (names or {}).get(parameter, "")  # type: ignore[call-overload]
            raise ValueError(
                "complex parameters cannot be exchanged; keep real and imaginary part of "
                f"{repr(name) if name else 'this one'}, {parameter.dtype} {list(parameter.shape)}, "
                "as parameters (torch.view_as_real)"
            )
