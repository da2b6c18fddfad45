"""Objects come back as they were, and bytes that are none never do more than raise."""

from __future__ import annotations

import math
import struct
import warnings
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gtopk.objects import (
    HEADER_BYTES,
    MAX_DEPTH,
    Code,
    ObjectFormatError,
    decode,
    encode,
    holds_pickle,
)

HEADER = struct.Struct("<4sHHQQ")


@pytest.fixture(autouse=True, scope="module")
def without_pickle() -> Iterator[None]:
    """Keep this machine's own settings out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GTOPK_ALLOW_PICKLE", raising=False)
        yield


def message(head: bytes, bulk: bytes = b"", flags: int = 0) -> bytes:
    """Return a message whose header is right, whatever its head and bulk are."""
    content = head + bulk
    return HEADER.pack(b"GTKO", 1, flags, len(head), zlib.crc32(content)) + content


def packed(*values: object) -> bytes:
    """Return a head: codes as empty extensions, everything else as msgpack has it."""
    packer = msgpack.Packer()
    return b"".join(
        packer.pack(msgpack.ExtType(value, b"") if isinstance(value, Code) else value)
        for value in values
    )


def content_of(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of a tensor's elements."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    return [int(byte) for byte in flat]


def same(a: Any, b: Any) -> bool:
    """Tell whether two objects are of the same types, with the same content to the bit."""
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
        | st.builds(
            defaultdict,
            st.sampled_from([None, list, dict, set, int, float]),
            st.dictionaries(keys, inner, max_size=4),
        )
    ),
    max_leaves=12,
)


@given(objects)
def test_objects_come_back_as_they_were(obj: object) -> None:
    assert same(decode(encode(obj)), obj)


@given(objects)
def test_bytes_memoryviews_and_arrays_decode_alike(obj: object) -> None:
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
def test_this_object_comes_back_as_it_was(obj: object) -> None:
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
def test_tensors_of_every_dtype_come_back_to_the_bit(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.empty(shape, dtype=dtype)
    content = tensor.view(-1).view(torch.uint8)
    content.copy_(torch.arange(content.numel()) % (2 if dtype is torch.bool else 256))
    assert same(decode(encode(tensor)), tensor)
    assert decode(encode(dtype)) is dtype


def test_what_comes_back_is_writable_and_shares_nothing_with_the_message() -> None:
    data = bytearray(encode({"array": np.zeros(4), "tensor": torch.zeros(4)}))
    first = decode(data)
    first["array"] += 1
    first["tensor"] += 1
    assert same(decode(data), {"array": np.zeros(4), "tensor": torch.zeros(4)})


def test_tensors_land_on_the_cpu_whatever_the_default_device() -> None:
    data = encode(torch.ones(2))
    with torch.device("meta"):
        assert decode(data).device == torch.device("cpu")


def test_dicts_keep_the_order_of_their_keys() -> None:
    assert list(decode(encode({"b": 0, "a": 1, 3: 2}))) == ["b", "a", 3]


def test_a_models_state_dict_keeps_its_version_numbers() -> None:
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
def test_the_state_of_every_optimizer_comes_back_as_it_was(make: Any) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same(decode(encode(optimizer.state_dict())), optimizer.state_dict())


class Point(NamedTuple):
    x: int


class Colour(Enum):
    RED = 1


class Opaque:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    def __hash__(self) -> int:
        return 0


class Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("no way")


@pytest.mark.parametrize(
    ("obj", "place"),
    [
        (Opaque(), "Opaque at its top"),
        ({"state": [{"step": Opaque()}]}, r"Opaque at \['state'\]\[0\]\['step'\]"),
        ({"state": {Opaque(): 1}}, r"Opaque at \['state'\] \(key <.*>\)"),
        ((1, {Opaque()}), r"Opaque at \[1\] \(member <.*>\)"),
        (slice(0, Opaque()), r"Opaque at \.stop"),
        ([Colour.RED], r"Colour at \[0\]"),
        ([Point(1)], r"Point at \[0\]"),
        ([Path("/tmp")], r"PosixPath at \[0\]"),
        ([Counter("a")], r"collections\.Counter at \[0\]"),
        ([int], r"type at \[0\]"),
        ([defaultdict(Opaque)], r"collections\.defaultdict \(of <class .*Opaque'>\) at \[0\]"),
        ([np.array([None])], r"numpy\.ndarray \(of dtype object\) at \[0\]"),
        ([np.zeros(2, "i4,f4")], r"numpy\.ndarray \(of dtype .*\) at \[0\]"),
        ([np.ma.masked_array([1])], r"MaskedArray at \[0\]"),
        ([np.void(b"ab")], r"numpy\.void \(of dtype .*\) at \[0\]"),
        ([torch.ones(2).to_sparse()], r"torch\.Tensor \(not dense\) at \[0\]"),
        ([torch.ones(2, device="meta")], r"torch\.Tensor \(on the meta device.*\) at \[0\]"),
        ([torch.ones((1,) * 65)], r"torch\.Tensor \(of 65 dimensions\) at \[0\]"),
        ([torch.nn.Buffer(torch.ones(1)), torch.nn.Linear(1, 1)], r"Linear at \[1\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_objects_are_refused_by_type_and_place(obj: object, place: str) -> None:
    with pytest.raises(TypeError, match=f"got a .*{place};.* set GTOPK_ALLOW_PICKLE=1 on every"):
        encode(obj)


def test_an_ordered_dict_with_attributes_of_its_own_is_refused() -> None:
    labelled: OrderedDict[str, int] = OrderedDict(a=1)
    labelled.label = "b"  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"OrderedDict \(with attributes \['label'\]\)"):
        encode(labelled)


def nested(depth: int) -> list[Any]:
    """Return `depth` lists inside one another."""
    obj: list[Any] = []
    for _ in range(depth - 1):
        obj = [obj]
    return obj


def test_objects_nest_a_hundred_deep_and_no_deeper() -> None:
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(TypeError, match="nested 100 deep"):
        encode(nested(MAX_DEPTH + 1))


def test_a_list_that_contains_itself_is_refused() -> None:
    obj: list[Any] = []
    obj.append(obj)
    with pytest.raises(TypeError, match="contains itself"):
        encode({"a": obj})


class TestPickles:
    """What has no code of its own travels as a pickle, where both sides allow it."""

    @pytest.fixture(autouse=True)
    def allow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GTOPK_ALLOW_PICKLE", "1")

    def test_only_the_object_without_a_code_is_pickled(self) -> None:
        obj = {"a": [Path("/tmp"), 1], "b": torch.ones(2), "c": np.array([None, "x"])}
        data = encode(obj)
        assert holds_pickle(data)
        back = decode(data)
        assert back["a"] == obj["a"]
        assert torch.equal(back["b"], torch.ones(2))
        assert back["c"].tolist() == [None, "x"]

    def test_objects_of_known_types_hold_no_pickle(self) -> None:
        assert not holds_pickle(encode({"a": [torch.ones(2), 1]}))

    def test_pickle_serves_where_cloudpickle_is_missing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert decode(encode(Path("/tmp"))) == Path("/tmp")

    def test_a_rank_that_does_not_allow_pickles_refuses_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = encode(Path("/tmp"))
        monkeypatch.setenv("GTOPK_ALLOW_PICKLE", "0")
        with pytest.raises(ObjectFormatError, match="set GTOPK_ALLOW_PICKLE=1 on this rank too"):
            decode(data)

    def test_a_pickle_that_the_flags_conceal_is_refused(self) -> None:
        data = bytearray(encode(Path("/tmp")))
        data[6:8] = b"\0\0"
        with pytest.raises(ObjectFormatError, match="conceal"):
            decode(data)

    def test_an_object_that_cannot_be_pickled_is_refused_by_place(self) -> None:
        with pytest.raises(TypeError, match=r"cannot pickle the .*Unpicklable at \['a'\]: no way"):
            encode({"a": Unpicklable()})

    def test_a_pickle_that_fails_to_load_is_malformed(self) -> None:
        data = message(packed(Code.PICKLE, 0, 3), b"abc", flags=1)
        with pytest.raises(ObjectFormatError, match="UnpicklingError"):
            decode(data)


def test_the_message_is_as_drawn() -> None:
    data = encode({"lr": (0.5, torch.zeros(3))})
    head = packed(Code.DICT, 2, "lr", Code.TUPLE, 2, 0.5, Code.TENSOR, 3, "float32", False, 3, 12)
    assert data == message(head, bytes(12))
    assert len(data) == HEADER_BYTES + len(head) + 12


def refused(data: bytes) -> str:
    """Return the text of the one error that malformed bytes may end in."""
    with pytest.raises(ObjectFormatError) as caught:
        decode(data)
    return str(caught.value)


GOOD = encode([1, b"abc"])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "fewer than their header's 24"),
        (GOOD[:23], "fewer than their header's 24"),
        (b"NOPE" + GOOD[4:], "they begin with b'NOPE'"),
        (GOOD[:4] + b"\2" + GOOD[5:], "format version is 2"),
        (GOOD[:6] + b"\2" + GOOD[7:], "flags are 2"),
        (GOOD[:8] + b"\xff" * 8 + GOOD[16:], "head of 18446744073709551615 bytes"),
        (GOOD[:-1], "checksum"),
        (GOOD[:-1] + b"d", "checksum"),
        (message(b""), "OutOfData"),
        (message(packed(1, 2)), "something follows"),
        (message(packed(1), b"a"), "something follows"),
        (message(packed([])), "got a msgpack list"),
        (message(packed([1])), "max_array_len"),
        (message(packed({1: 2})), "max_map_len"),
        (message(packed(b"a")), "a plain value is missing, got a msgpack bytes"),
        (message(b"\xd6\xff\0\0\0\0"), "got a msgpack msgpack.ext.Timestamp"),
        (message(packed(msgpack.ExtType(99, b""), 0, 0)), "extension 99 is unknown"),
        (message(packed(msgpack.ExtType(Code.LIST, b"a"), 0)), "an extension holds data"),
        (message(packed(Code.LIST, -1)), "a count is missing"),
        (message(packed(Code.LIST, True, 1)), "a count is missing"),
        (message(packed(Code.LIST, 2**64 - 1, 1)), "OutOfData"),
        (message(packed(Code.BYTES, 0, 2**64 - 1), b"abc"), "18446744073709551615 bytes are"),
        (message(packed(Code.BYTES, 1, "utf-8", 3), b"abc"), "TypeError"),
        (message(packed(*[Code.LIST, 1] * 101, 0)), "nested more than 100 deep"),
        (message(packed(Code.SET, 2, 1, 1.0)), "a member twice"),
        (message(packed(Code.SET, 1, Code.LIST, 0)), "unhashable"),
        (message(packed(Code.DICT, 4, "a", 1, "a", 2)), "a key twice"),
        (message(packed(Code.DICT, 1, "a")), "ValueError"),
        (message(packed(Code.ORDERED_DICT, 0)), "IndexError"),
        (message(packed(Code.DEFAULT_DICT, 1, "eval")), "KeyError"),
        (message(packed(Code.RANGE, 3, 0, 1, 0)), "ValueError"),
        (message(packed(Code.TORCH_DTYPE, 1, "save")), "KeyError"),
        (message(packed(Code.TORCH_DEVICE, 1, "moon")), "RuntimeError"),
        (message(packed(Code.TORCH_SIZE, 1, -1)), "a dimension is missing"),
        (message(packed(Code.NUMPY_ARRAY, 2, "|O", 1, 8), b"12345678"), "dtype is unknown"),
        (message(packed(Code.NUMPY_ARRAY, 2, "i4,i4", 1, 8), b"12345678"), "dtype is unknown"),
        (message(packed(Code.NUMPY_ARRAY, 2, 7, 1, 8), b"12345678"), "TypeError"),
        (message(packed(Code.NUMPY_ARRAY, 2, "<f8", 2**60, 8), b"12345678"), "shape does not go"),
        (message(packed(Code.NUMPY_ARRAY, 3, "<f8", 2**62, 0, 0)), "ValueError"),
        (message(packed(Code.NUMPY_ARRAY, 66, "|i1", *[1] * 65, 1), b"1"), "65 dimensions"),
        (message(packed(Code.NUMPY_ARRAY, 2, "|b1", 2, 2), b"\1\2"), "neither 0 nor 1"),
        (message(packed(Code.NUMPY_ARRAY, 2, ">U1", 1, 4), b"\0\x11\0\0"), "beyond Unicode"),
        (message(packed(Code.NUMPY_SCALAR, 2, "|i1", 1, 1), b"1"), "TypeError"),
        (message(packed(Code.TENSOR, 3, "float32", False, 2**61, 8), b"12345678"), "not go"),
        (message(packed(Code.TENSOR, 5, "int8", False, 0, 2**62, 2**62, 0)), "RuntimeError"),
        (message(packed(Code.TENSOR, 3, "quint8", False, 1, 1), b"1"), "quantized"),
        (message(packed(Code.TENSOR, 3, "int8", True, 1, 1), b"1"), "RuntimeError"),
        (message(packed(Code.TENSOR, 3, "bool", False, 1, 1), b"\2"), "neither 0 nor 1"),
        (message(packed(Code.TENSOR, 3, "int8", False, -1, 0)), "a dimension is missing"),
    ],
)
def test_malformed_bytes_are_refused_with_a_reason(data: bytes, reason: str) -> None:
    assert reason in refused(data)


def test_arrays_of_anything_but_bytes_are_the_callers_mistake() -> None:
    with pytest.raises(TypeError, match="contiguous bytes"):
        decode(np.zeros(40, np.float32))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="contiguous bytes"):
        decode(np.zeros(80, np.uint8)[::2])


def decodes_or_is_refused(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some dtypes when a tensor of them is made
        try:
            decode(data)
        except ObjectFormatError:
            return


@given(st.binary())
def test_random_bytes_are_refused(data: bytes) -> None:
    refused(data)


@given(st.binary(max_size=64), st.binary(max_size=64), st.integers(0, 1))
def test_a_random_head_decodes_or_is_refused(head: bytes, bulk: bytes, flags: int) -> None:
    decodes_or_is_refused(message(head, bulk, flags))


@given(
    st.lists(
        st.sampled_from(list(Code))
        | st.integers(0, 4)
        | st.sampled_from(["float32", "bool", "complex32", "<f4", "|b1", "<U1", "|S0", "list"])
        | st.sampled_from([None, True, 0.5, -1, 2**63])
    ),
    st.binary(max_size=32),
)
@settings(max_examples=500)
def test_a_random_order_of_values_decodes_or_is_refused(values: list[Any], bulk: bytes) -> None:
    decodes_or_is_refused(message(packed(*values), bulk))


@given(objects, st.data())
@settings(max_examples=300)
def test_a_mutated_message_decodes_or_is_refused(obj: object, data: st.DataObject) -> None:
    good = bytearray(encode(obj))
    position = data.draw(st.integers(0, len(good) - 1))
    good[position] ^= data.draw(st.integers(1, 255))
    if position >= HEADER_BYTES:
        refused(bytes(good))
        good[16:24] = struct.pack("<Q", zlib.crc32(good[HEADER_BYTES:]))
    decodes_or_is_refused(bytes(good))


@given(objects, st.data())
def test_a_cut_message_is_refused(obj: object, data: st.DataObject) -> None:
    good = encode(obj)
    cut = good[: data.draw(st.integers(0, len(good) - 1))]
    refused(cut)
    if len(cut) >= HEADER_BYTES:
        crc = struct.pack("<Q", zlib.crc32(cut[HEADER_BYTES:]))
        refused(cut[:16] + crc + cut[HEADER_BYTES:])
