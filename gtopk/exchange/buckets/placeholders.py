"""Placeholders: gradients of zeros that parameters have before their first backward pass.

Horovod gives them to the parameters of an optimizer that it wraps, and scripts read them. A
placeholder does not count as a gradient: its parameter is missing in a step's report, is passed
over where no rank has a gradient for it, and is not stepped when it is frozen. Backward adds to the
placeholder, so that no memory is taken twice; a sparse gradient replaces it.

Its mark is the version of the tensor: a write into the placeholder makes it a gradient.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Final

import torch

_MARK: Final = "_gtopk_placeholder"
# Placeholders that may be untouched, by id: where there are none, no search is needed.
_placed: Final[weakref.WeakValueDictionary[int, torch.Tensor]] = weakref.WeakValueDictionary()


def place_placeholders(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give zeros as gradients to the parameters that require one, in place of any they have.

    A gradient on a GPU is zeroed in its memory: a CUDA graph may go on to write there. Other ones
    are replaced and stay as they are, for other objects that refer to them.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            gradient = parameter.grad
            if gradient is not None and _may_be_of_a_graph(gradient):
                parameter.grad = gradient.detach().zero_()
            else:
                parameter.grad = torch.zeros_like(parameter)
            _mark(parameter.grad)
            _drop_for_sparse(parameter)


def _may_be_of_a_graph(gradient: torch.Tensor) -> bool:
    dense = gradient.layout == torch.strided and 0 not in gradient.stride()
    return gradient.is_cuda and dense


def lacks_gradient(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter has no gradient, or an untouched placeholder."""
    gradient = parameter.grad
    return gradient is None or _is_untouched(gradient)


def lack_gradients(gradients: Iterable[torch.Tensor | None]) -> list[bool]:
    """Tell of each gradient whether it is None or an untouched placeholder, as `lacks_gradient`.

    Faster than one by one: a step asks this of every parameter.
    """
    if not _placed:
        return [gradient is None for gradient in gradients]
    return [gradient is None or _is_untouched(gradient) for gradient in gradients]


def _is_untouched(gradient: torch.Tensor) -> bool:
    if (mark := getattr(gradient, _MARK, None)) is None:
        return False
    if mark != gradient._version:
        # Once `_placed` is empty, no step searches it any more.
        _placed.pop(id(gradient), None)
        return False
    return True


def remove_placeholders(parameters: Iterable[torch.Tensor]) -> None:
    """Replace placeholders by None, so that an optimizer passes over these parameters."""
    if not _placed:
        return
    asked = list(parameters)
    for parameter in itertools.compress(asked, lack_gradients([each.grad for each in asked])):
        parameter.grad = None


def placeholders(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters' untouched placeholders."""
    if not _placed:
        return []
    found = [parameter.grad for parameter in parameters]
    lacking = itertools.compress(found, lack_gradients(found))
    return [placeholder for placeholder in lacking if placeholder is not None]


def renew(placeholders: Iterable[torch.Tensor]) -> None:
    """Mark these as placeholders again, after zeros were written into them."""
    for placeholder in placeholders:
        _mark(placeholder)


def _mark(placeholder: torch.Tensor) -> None:
    # By id below: a WeakSet would compare tensors with ==, value by value.
    setattr(placeholder, _MARK, placeholder._version)
    _placed[id(placeholder)] = placeholder


def _drop_for_sparse(parameter: torch.nn.Parameter) -> None:
    """Drop the placeholder when a sparse gradient comes: added to zeros, it would become dense.

    Autograd calls the hook before it accumulates the gradient.
    """
    known = weakref.ref(parameter)  # the parameter holds the hook

    def hook(gradient: torch.Tensor) -> None:
        # For one gradient only: after it the placeholder is gone, or has become a gradient.
        handle.remove()
        owner = known()
        if gradient.is_sparse and owner is not None:
            remove_placeholders([owner])

    handle = parameter.register_hook(hook)
