"""Parameters are known by names that all ranks can agree on."""

from __future__ import annotations

import pytest
import torch

from gtopk.parameters import name_parameters


def test_each_double_name_is_told_once() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(6)]
    names = ["weight", "bias", "weight", "alone", "bias", "weight"]
    optimizer = torch.optim.SGD(parameters, lr=1)
    with pytest.raises(ValueError, match="come twice: 'bias', 'weight'; with"):
        name_parameters(optimizer, zip(names, parameters, strict=True))
    apart = [f"{index}.{name}" for index, name in enumerate(names)]
    named = name_parameters(optimizer, zip(apart, parameters, strict=True))
    assert named == dict(zip(parameters, apart, strict=True))
