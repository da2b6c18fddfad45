"""Objects come back unchanged, and damaged ones only raise."""

from __future__ import annotations

import math
import struct
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gtopk.runtime.object_codec import HEADER_BYTES, decode, encode


def content_of(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of a tensor's elements."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    return [int(byte) for byte in flat]


def same(a: Any, b: Any) -> bool:
    """Tell whether two objects have the same types and bit-identical content."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.requires_grad == b.requires_grad
            and content_of(a) == content_of(b)
        )
    if isinstance(a, np.str_ | np.bytes_):
        return bool(a == b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, dict):
        return (
            len(a) == len(b)
            and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
            and getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        )
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same([*a], [*b])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, slice | range):
        return same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    return bool(a == b)


numpy_dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.unsigned_integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?")
    | hnp.complex_number_dtypes(endianness="?")
    | hnp.datetime64_dtypes(endianness="?")
    | hnp.timedelta64_dtypes(endianness="?")
    | hnp.byte_string_dtypes(endianness="?")
    | hnp.unicode_string_dtypes(endianness="?")
)
arrays = hnp.arrays(numpy_dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
scalars = hnp.arrays(numpy_dtypes, ()).map(lambda array: array[()])
hashable_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 0])])
)
keys = st.recursive(
    hashable_leaves,
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
tensors = arrays.filter(lambda array: array.dtype.kind in "biufc").map(
    lambda array: torch.from_numpy(
        array.astype(array.dtype.newbyteorder("=")).astype(
            {"f16": "f8", "c32": "c16"}.get(array.dtype.str[1:], array.dtype.str[1:])
        )
    )
)
leaves = (
    hashable_leaves
    | scalars
    | arrays
    | tensors
    | st.binary().map(bytearray)
    | st.builds(slice, st.none() | st.integers(), st.integers(), st.none() | st.integers())
    | st.builds(range, st.integers(), st.integers(), st.integers(min_value=1))
)
objects = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(keys, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=4).map(Counter)
        | st.builds(
            defaultdict,
            st.sampled_from([None, list, dict, set, int, float]),
            st.dictionaries(keys, inner, max_size=4),
        )
    ),
    max_leaves=12,
)


@given(objects)
def test_random_objects_survive_round_trip(obj: object) -> None:
    assert same(decode(encode(obj)), obj)


@given(objects)
def test_bytes_memoryviews_and_arrays_decode_equally(obj: object) -> None:
    data = encode(obj)
    for form in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert same(decode(form), obj)


@pytest.mark.parametrize(
    "obj",
    [
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        2**64,
        -(10**400),
        math.nan,
        -math.inf,
        -0.0,
        complex(math.nan, -0.0),
        "\ud800 is half a character, \0 is none",
        np.str_("ends in \0"),
        np.bytes_(b"ends in \0"),
        np.float64(0.1),
        np.bool_(True),
        np.longdouble(1) / 3,
        np.datetime64("NaT"),
        np.timedelta64(25, "s"),
        np.zeros((2, 0, 3), ">u2"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["é", ""]),
        slice(None),
        slice("a", torch.float32),
        range(10**30, 0, -7),
        {1: "a", "1": "b", (1, (None,)): "c", frozenset({1.5}): "d"},
        defaultdict(None, {1: 2}),
        deque([1.5, "a"], maxlen=3),
        deque([torch.ones(2)]),
        Path("data", "\udcff"),
        torch.Size([]),
        torch.device("cuda:3"),
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.nn.Parameter(torch.arange(3), requires_grad=False),
        torch.ones(2, requires_grad=True),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor(True),
        torch.empty(3, 0, 2, dtype=torch.bfloat16),
        torch.ones(7)[::5][1:],
        torch.ones(7)[:0:5],
        torch.ones(3).expand(2, 3),
    ],
    ids=lambda obj: (
        f"{type(obj).__name__}-{obj!r}"[:40].replace("\0", "NUL").replace("\ud800", "?")
    ),
)
def test_chosen_objects_survive_round_trip(obj: object) -> None:
    assert same(decode(encode([obj, obj])), [obj, obj])


DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and not str(dtype).startswith(("torch.q", "torch.complex32"))
    },
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_tensors_of_every_dtype_survive_round_trip_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.empty(shape, dtype=dtype)
    content = tensor.view(-1).view(torch.uint8)
    content.copy_(torch.arange(content.numel()) % (2 if dtype is torch.bool else 256))
    assert same(decode(encode(tensor)), tensor)
    assert decode(encode(dtype)) is dtype


def test_decoded_arrays_are_writable_and_share_no_memory_with_the_message() -> None:
    data = bytearray(encode({"array": np.zeros(4), "tensor": torch.zeros(4)}))
    first = decode(data)
    first["array"] += 1
    first["tensor"] += 1
    assert same(decode(data), {"array": np.zeros(4), "tensor": torch.zeros(4)})


def test_tensors_are_decoded_on_the_cpu_whatever_the_default_device() -> None:
    data = encode(torch.ones(2))
    with torch.device("meta"):
        assert decode(data).device == torch.device("cpu")


def test_dicts_keep_the_order_of_their_keys() -> None:
    assert list(decode(encode({"b": 0, "a": 1, 3: 2}))) == ["b", "a", 3]


def test_state_dict_keeps_its_version_numbers() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    back = decode(encode(state))
    assert same(back, state)
    assert back._metadata == state._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), amsgrad=True),
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.LBFGS,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    ],
)
def test_optimizer_state_survives_round_trip_bit_for_bit(make: Any) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same(decode(encode(optimizer.state_dict())), optimizer.state_dict())


@given(objects, st.data())
@settings(max_examples=300)
def test_mutated_message_decodes_or_is_refused(
    refused: Callable[[bytes], str],
    decodes_or_is_refused: Callable[[bytes], None],
    obj: object,
    data: st.DataObject,
) -> None:
    good = bytearray(encode(obj))
    position = data.draw(st.integers(0, len(good) - 1))
    good[position] ^= data.draw(st.integers(1, 255))
    if position >= HEADER_BYTES:
        refused(bytes(good))
        good[16:24] = struct.pack("<Q", zlib.crc32(good[HEADER_BYTES:]))
    decodes_or_is_refused(bytes(good))


@given(objects, st.data())
def test_truncated_message_is_refused(
    refused: Callable[[bytes], str], obj: object, data: st.DataObject
) -> None:
    good = encode(obj)
    cut = good[: data.draw(st.integers(0, len(good) - 1))]
    refused(cut)
    if len(cut) >= HEADER_BYTES:
        crc = struct.pack("<Q", zlib.crc32(cut[HEADER_BYTES:]))
        refused(cut[:16] + crc + cut[HEADER_BYTES:])
