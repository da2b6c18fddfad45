"""Backward passes are counted by parameter, and one too many is an error."""

from __future__ import annotations

import gc

import pytest
import torch

from gtopk.passes import Passes


def test_one_pass_more_than_the_limit_is_an_error_until_forgotten():
    parameter, other = (torch.nn.Parameter(torch.ones(2)) for _ in "ab")
    passes = Passes({parameter: "it", other: "the other"}, 2)
    for _ in range(2):
        parameter.sum().backward()
    other.sum().backward()
    with pytest.raises(AssertionError, match="'it' was computed 3 times"):
        parameter.sum().backward()
    passes.forget()
    parameter.sum().backward()


def test_parameters_outlive_what_counts_them():
    parameter = torch.nn.Parameter(torch.ones(2))
    Passes({parameter: "it"}, 1)
    gc.collect()
    for _ in range(3):
        parameter.sum().backward()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_step_takes_one_pass_at_least(limit):
    with pytest.raises(ValueError, match=f"at least 1, got {limit}"):
        Passes({}, limit)
