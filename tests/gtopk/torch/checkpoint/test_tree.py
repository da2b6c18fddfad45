"""States are split into JSON and tensors, and restored unchanged."""

from __future__ import annotations

import json
import math
import os
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.errors import DamagedError
from gtopk.torch.checkpoint import tree
from gtopk.torch.checkpoint.files import Content, Part, name_of, read_part, write_part
from gtopk.torch.checkpoint.tree import flatten, unflatten


def round_trip(obj):
    """Convert an object to JSON text and back."""
    taken = flatten(obj)
    return unflatten(json.loads(json.dumps(taken.tree, allow_nan=False)), taken.tensors)


def same(one, other):
    """Tell whether two objects are equal, including types, order and NaNs."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items())) and vars_of(one) == vars_of(other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def vars_of(mapping):
    return getattr(mapping, "__dict__", {})


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=9)
    | st.builds(lambda n: torch.arange(n) / 3, st.integers(0, 5))
    | st.builds(lambda n: np.arange(n, dtype=np.uint32), st.integers(0, 5))
)
keys = st.text(max_size=3) | st.integers() | st.sampled_from(["$tensor", "$", "a.b"])
objects = st.recursive(
    plain,
    lambda part: (
        st.lists(part, max_size=4)
        | st.lists(part, max_size=3).map(tuple)
        | st.dictionaries(keys, part, max_size=4)
        | st.dictionaries(keys, part, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(objects)
def test_random_objects_survive_round_trip(obj):
    assert same(round_trip(obj), obj)


def test_flatten_gives_what_the_docstring_draws():
    drawn = re.search(r"    JSON  (.*?)\n    tensors", tree.__doc__, re.DOTALL)[1]
    weight = torch.ones(2)
    obj = {"model": {"weight": weight}, "betas": (0.9, math.inf), "state": {0: "x"}}
    taken = flatten(obj)
    assert taken.tree == json.loads(drawn)
    assert list(taken.tensors) == ["model.weight"]


def test_state_dict_keeps_its_version_numbers():
    state = torch.nn.BatchNorm1d(3).state_dict()
    again = round_trip({"model": state})["model"]
    assert same(again, state)
    assert again._metadata == state._metadata


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_optimizer_state_survives_round_trip(optimizer):
    model = torch.nn.Linear(3, 2)
    one = optimizer(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    one.step()
    assert same(round_trip(one.state_dict()), one.state_dict())


def test_tensor_in_two_places_is_stored_once():
    weight = torch.ones(3)
    taken = flatten({"a": weight, "b": [weight]})
    assert list(taken.tensors) == ["a"]
    again = unflatten(*taken)
    assert again["a"] is again["b"][0]


@pytest.mark.parametrize("copy", [False, True])
def test_views_of_one_memory_are_written_separately(tmp_path, copy):
    whole = torch.arange(6.0)
    views = {"head": whole[:3], "tail": whole[3:], "all": whole, "turned": whole.view(2, 3).T}
    taken = flatten(views, copy=copy)
    before = {name: view.clone() for name, view in views.items()}
    if copy:
        whole.zero_()  # training continues before it is written
    part = Part(1, 1, 1, name_of(0))
    write_part(tmp_path, part, Content("", taken))
    found = read_part(tmp_path, part).state.tensors
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], view) for name, view in before.items())


def test_flatten_copies_no_tensor_by_default():
    """Otherwise a save would copy a whole bucket's memory, as states are views of it."""
    whole = torch.arange(6.0)
    taken = flatten({"head": whole[:3], "tail": whole[3:]})
    assert {t.untyped_storage().data_ptr() for t in taken.tensors.values()} == {
        whole.untyped_storage().data_ptr()
    }


@pytest.mark.parametrize("length", [1, 100, 10_000, 1_000_000])
@pytest.mark.parametrize("copy", [False, True])
def test_many_arrays_keep_their_own_values(length, copy):
    """None reuses memory just freed by another."""
    arrays = {f"a{i}": np.full(length, i) for i in range(8)}
    taken = flatten(arrays, copy=copy)
    assert len(taken.tensors) == len(arrays)
    assert same(unflatten(*taken), arrays)


def test_paths_that_join_to_the_same_name_stay_distinct():
    one, two = torch.zeros(1), torch.ones(1)
    obj = {"a.b": {"c": one}, "a": {"b.c": two}}
    assert sorted(flatten(obj).tensors) == ["a.b.c", "a.b.c~2"]
    assert same(round_trip(obj), obj)


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(2, requires_grad=True),
        torch.ones(4)[::4],
        torch.ones(4)[4::4],
        torch.ones(1).expand(3),
        torch.ones(2, dtype=torch.complex64),
        np.array(["text"]),
        np.float32(1.5),
        torch.float16,
        2**80,
        {1, 2},
    ],
    ids=repr,
)
def test_types_that_json_and_safetensors_lack_survive_round_trip(odd):
    assert same(round_trip({"x": odd})["x"], odd)


def test_tensor_and_its_negated_view_are_stored_separately():
    ones = torch.ones(2)
    assert same(round_trip({"a": ones, "b": torch._neg_view(ones)}), {"a": ones, "b": -ones})


def test_error_names_the_place_of_an_object_that_needs_a_pickle():
    with pytest.raises(TypeError, match=r"model\.hook: .*a function at.*GTOPK_ALLOW_PICKLE=1"):
        flatten({"model": {"hook": round_trip}})
    deep = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(TypeError, match="nested more than 100 deep"):
        flatten(deep)


@pytest.mark.parametrize(
    "damaged",
    [
        {"$tensor": "absent"},
        {"$tensor": ["a"]},
        {"$float": "much"},
        {"$array": "a", "$dtype": "object"},
        {"$array": "a", "$dtype": "uint16"},
        {"$array": "a"},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$ordered": 3, "$metadata": None},
        {"$tuple": 1},
        {"$object": "!"},
        {"$object": "AAAA"},
        {"$pickle": "gASVAAAAAAAAAAAu"},
    ],
    ids=json.dumps,
)
def test_malformed_tree_raises(damaged):
    with pytest.raises(DamagedError):
        unflatten([damaged], {"a": torch.zeros(2)})


def test_file_names_that_are_not_utf_8_may_be_keys(tmp_path):
    """Python represents bytes that are not UTF-8 as lone surrogates."""
    odd = {os.fsdecode(b"\xff.png"): torch.ones(2), "\\udcff.png": torch.zeros(2), "é": [1]}
    part = Part(1, 1, 1, name_of(0))
    write_part(tmp_path, part, Content("", flatten(odd)))
    state = read_part(tmp_path, part).state
    assert repr(unflatten(state.tree, state.tensors)) == repr(odd)
