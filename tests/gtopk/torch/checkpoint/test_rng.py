"""Random number generators continue unchanged after loading."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from gtopk.torch.checkpoint.state import check_generators, put_generators, take_generators
from gtopk.torch.checkpoint.tree import flatten, unflatten


def draw():
    return torch.rand(3).tolist(), np.random.rand(), random.gauss(0, 1), random.random()


def test_every_random_generator_is_restored():
    draw()  # the generators of Python and NumPy cache a second Gaussian
    np.random.normal()
    taken = flatten(take_generators(), copy=True)
    expected = draw()
    draw()
    put_generators(unflatten(json.loads(json.dumps(taken.tree)), taken.tensors))
    assert draw() == expected


def test_check_generators_refuses_a_gpu_state_of_the_wrong_size(monkeypatch):
    class GpuGenerator:
        def __init__(self, device: str = "cpu") -> None:
            self.device = device

        def set_state(self, state: torch.Tensor) -> None:
            if self.device == "cuda" and len(state) != 16:
                raise RuntimeError("RNG state is wrong size")

    state = take_generators()
    monkeypatch.setattr(torch, "Generator", GpuGenerator)
    check_generators({**state, "cuda": torch.zeros(3, dtype=torch.uint8)})  # there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_generators({**state, "cuda": torch.zeros(16, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match="wrong size"):
        check_generators({**state, "cuda": torch.zeros(3, dtype=torch.uint8)})
