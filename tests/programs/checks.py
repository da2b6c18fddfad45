"""What the programs that check behaviour on real ranks share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import pytest
import torch

import gtopk.torch as hvd


def raises(kind: type[BaseException], call: Callable[[], object], *parts: str) -> str:
    """Check that a call raises, with all of these parts in its text; return the text."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in: {text}"
    return text


def same_everywhere(text: str) -> bool:
    """Tell whether this text is the same on every rank."""
    return len(set(hvd.allgather_object(text))) == 1


def same_bits_everywhere(tensor: torch.Tensor) -> bool:
    """Tell whether this tensor is the same on every rank, to the bit."""
    rows = hvd.allgather(tensor.detach().reshape(1, -1).contiguous().view(torch.uint8))
    return bool((rows == rows[0]).all())


def run_tests(program: Mapping[str, object]) -> None:
    """Call every function named test_... in the order of the file; warnings are errors.

    An exception ends the job on every rank.
    """
    warnings.simplefilter("error")
    for name, test in list(program.items()):
        if name.startswith("test_") and callable(test):
            test()
