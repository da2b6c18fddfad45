"""Random numbers go on as they would have."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from gtopk.torch.checkpoint.state import put_generators, take_generators
from gtopk.torch.checkpoint.tree import put_together, take_apart


def draw():
    return torch.rand(3).tolist(), np.random.rand(), random.gauss(0, 1), random.random()


def test_every_generator_goes_on():
    draw()  # Python's and NumPy's keep a second Gaussian for later
    np.random.normal()
    taken = take_apart(take_generators(), copy=True)
    expected = draw()
    draw()
    put_generators(put_together(json.loads(json.dumps(taken.tree)), taken.tensors))
    assert draw() == expected
