"""The random numbers that are still to come: torch's, NumPy's and Python's generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def take_generators() -> dict[str, Any]:
    """Return the state of this rank's generators; of GPUs', the current one's."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": (version, np.array(words, np.uint32), gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def check_generators(state: dict[str, Any]) -> None:
    """Raise an error for what `put_generators` could not put in; nothing is changed."""
    torch.Generator().set_state(state["torch"])
    np.random.RandomState().set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.Random().setstate((version, tuple(words.tolist()), gauss))


def put_generators(state: dict[str, Any]) -> None:
    """Make the generators go on from a state."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
