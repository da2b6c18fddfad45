"""Parameters have names that are the same on all ranks."""

from __future__ import annotations

import pytest
import torch

from gtopk.exchange.buckets.parameters import name_parameters, require_trained


def test_duplicate_names_raise_and_are_listed_once() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(6)]
    names = ["weight", "bias", "weight", "alone", "bias", "weight"]
    optimizer = torch.optim.SGD(parameters, lr=1)
    with pytest.raises(ValueError, match="come twice: 'bias', 'weight'; with"):
        name_parameters(optimizer, zip(names, parameters, strict=True))
    unique = [f"{index}.{name}" for index, name in enumerate(names)]
    named = name_parameters(optimizer, zip(unique, parameters, strict=True))
    assert named == dict(zip(parameters, unique, strict=True))


def test_parameter_added_later_keeps_its_given_name() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in "ab")
    optimizer = torch.optim.SGD([first], lr=1)
    names = name_parameters(optimizer, [("a", first), ("b", second)])
    assert list(names.values()) == ["a"]
    optimizer.add_param_group({"params": [second]})
    names.add(optimizer.param_groups)
    assert names == {first: "a", second: "b"}


def test_invented_names_are_unique() -> None:
    first, second, third = (torch.nn.Parameter(torch.zeros(1)) for _ in "abc")
    optimizer = torch.optim.SGD([first, second], lr=1)
    names = name_parameters(optimizer, None)
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [third, first]})
    names.add(optimizer.param_groups)
    assert names == {first: "noname.0.0", second: "noname.0.1", third: "noname.0.0~2"}


def test_names_given_to_torchs_optimizer_are_used() -> None:
    model = torch.nn.Linear(2, 1)
    try:
        optimizer = torch.optim.SGD(model.named_parameters(), lr=1)
    except TypeError:
        pytest.skip("this torch takes parameters without names only")
    assert list(name_parameters(optimizer, None).values()) == ["weight", "bias"]
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(1)))
    names = name_parameters(optimizer, None)
    assert list(names.values()) == ["weight", "bias", "noname.0.2"]


def test_uninitialized_parameter_raises_with_its_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(3))
    names = {parameter: name for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=r"parameter '1.weight' has no size yet: run a batch"):
        require_trained(names)
    model(torch.zeros(1, 2))
    assert len(require_trained(names)) == 4
