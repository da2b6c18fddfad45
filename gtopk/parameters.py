"""The names of an optimizer's parameters, as the ranks must agree on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[torch.nn.Parameter, str]:
    """Return the name of every parameter the optimizer steps, in its order.

    Raises ValueError when names are double, missing, or no pairs at all.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if named_parameters is None:
        return {p: f"noname.{i}.{j}" for i, group in enumerate(groups) for j, p in enumerate(group)}
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
        for i, group in enumerate(groups)
        for j, p in enumerate(group)
        if p not in named
    ]
    if unnamed:
        raise ValueError(
            "named_parameters was given, but the optimizer has parameters that are not in it: "
            f"{'; '.join(unnamed)}"
        )
    return {p: named[p] for group in groups for p in group}


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


def name_later_ones(
    param_groups: Iterable[dict[str, Any]], names: dict[torch.nn.Parameter, str]
) -> None:
    """Add the names of parameters that were not there yet when the others were named."""
    for i, group in enumerate(param_groups):
        for j, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"noname.{i}.{j}")
