"""The supported types: the code of each, how to take it apart and how to rebuild it.

Leaves consist of plain values and bytes, composites of objects. A dataclass is named in the
message, looked up among imported modules, and filled field by field. Neither its __init__ nor its
properties run, so a message cannot execute code that its sender chose.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

MAX_DIMENSIONS: Final = 64  # for arrays and tensors: NumPy's own limit

Plain: TypeAlias = bool | int | float | str | None
Buffer: TypeAlias = bytes | bytearray | memoryview


class ObjectFormatError(ValueError):
    """Raised for bytes that are not a valid encoded object."""


class Code(IntEnum):
    """The msgpack extension code of each type; part of the format, so never renumber."""

    LIST = 1
    TUPLE = 2
    SET = 3
    FROZENSET = 4
    DICT = 5
    ORDERED_DICT = 6
    DEFAULT_DICT = 7
    SLICE = 8
    RANGE = 9
    TORCH_SIZE = 10
    COUNTER = 11
    NAMESPACE = 12
    SIMPLE_NAMESPACE = 13
    DATACLASS = 14
    COMPLEX = 20
    BIG_INT = 21
    BYTES = 22
    BYTEARRAY = 23
    NUMPY_ARRAY = 24
    NUMPY_SCALAR = 25
    NUMPY_STR = 26
    NUMPY_BYTES = 27
    TENSOR = 28
    PARAMETER = 29
    TORCH_DTYPE = 30
    TORCH_DEVICE = 31
    PICKLE = 32
    PATH = 33
    DEQUE = 34


def malformed(reason: str) -> ObjectFormatError:
    """Return the error for malformed bytes."""
    return ObjectFormatError(f"the object's bytes are malformed: {reason}")


def type_name(kind: type) -> str:
    """Return a type's name with its module, as in an import."""
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{where}{kind.__qualname__}"


class Leaf(NamedTuple):
    """The codec of a type that consists of plain parts and bytes."""

    code: Code
    to_parts: Callable[[Any], tuple[Sequence[Plain], Buffer]]
    from_parts: Callable[..., Any]  # takes the bytes, then the parts


class UnsupportedError(Exception):
    """Raised for an object of a known type that cannot be encoded; its text says why."""


def leaf_of(obj: object) -> Leaf:
    """Return the leaf codec for an object, or raise UnsupportedError."""
    leaf = _LEAF_OF.get(type(obj))
    if leaf is not None:
        return leaf
    if isinstance(obj, np.generic):
        return _LEAF_OF[np.generic]
    raise UnsupportedError


def _big_int_parts(number: int) -> tuple[Sequence[Plain], Buffer]:
    # One extra bit for the sign.
    return (), number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


def _bytes_parts(content: bytes | bytearray) -> tuple[Sequence[Plain], Buffer]:
    return (), content


def dimension(value: object) -> int:
    """Return an unpacked value; raise unless it can be an array dimension."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise malformed("a dimension is missing")
    return value


def _shape(dimensions: Sequence[object], itemsize: int, content: memoryview) -> tuple[int, ...]:
    """Return the shape of an array; raise unless its elements take exactly these bytes."""
    shape = tuple(dimension(size) for size in dimensions)
    if len(shape) > MAX_DIMENSIONS:
        raise malformed(f"an array has {len(shape)} dimensions")
    if math.prod(shape) * itemsize != content.nbytes:
        raise malformed(f"an array's shape does not match its {content.nbytes} bytes")
    return shape


# Excludes objects, which are stored as addresses, and records.
_NUMPY_DTYPE: Final = re.compile(
    r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8(\[\w+(/\w+)?\])?|[SU]\d{1,9})"
)


def _array_parts(obj: NDArray[Any] | np.generic) -> tuple[Sequence[Plain], Buffer]:
    array = np.asarray(obj, order="C")
    name = array.dtype.str
    if not _NUMPY_DTYPE.fullmatch(name) or np.dtype(name) != array.dtype:
        raise UnsupportedError(f"of dtype {array.dtype}")
    content = array.reshape(-1).view(np.uint8).data if array.nbytes else b""
    return (name, *array.shape), content


def _array(content: memoryview, name: str, *dimensions: object) -> NDArray[Any]:
    if not _NUMPY_DTYPE.fullmatch(name):
        raise malformed("an array's dtype is unknown")
    dtype = np.dtype(name)
    shape = _shape(dimensions, dtype.itemsize, content)
    # A copy is writable and does not keep the whole message in memory.
    array: NDArray[Any] = np.ndarray(shape, dtype, bytearray(content))
    if dtype.kind == "b":
        _check_bools(array.view(np.uint8))
    if dtype.kind == "U" and content.nbytes:
        points = array.reshape(-1).view(np.dtype("u4").newbyteorder(dtype.byteorder))
        if (points > 0x10FFFF).any():
            raise malformed("a character lies beyond Unicode")
    return array


def _check_bools(elements: NDArray[np.uint8]) -> None:
    if (elements > 1).any():  # NumPy and torch count and index with bools without checking bytes
        raise malformed("a bool is neither 0 nor 1")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TORCH_DTYPES: Final = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def _tensor_parts(tensor: torch.Tensor) -> tuple[Sequence[Plain], Buffer]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise UnsupportedError("not dense")
    if tensor.device.type == "meta":
        raise UnsupportedError("on the meta device, which holds no data")
    if tensor.dim() > MAX_DIMENSIONS:
        raise UnsupportedError(f"of {tensor.dim()} dimensions")
    # Resolve lazy negation and conjugation: the stored values must be the real ones.
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not view(-1): tensors of at most one element may keep odd strides, which other dtypes refuse.
    content = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
    return (dtype_name(tensor.dtype), tensor.requires_grad, *tensor.shape), content


def _tensor(
    content: memoryview, name: str, requires_grad: bool, *dimensions: object
) -> torch.Tensor:
    dtype = TORCH_DTYPES[name]
    if name.startswith("q"):
        raise malformed("a tensor is quantized")
    shape = _shape(dimensions, dtype.itemsize, content)
    # Copy into it: a tensor made from the message's bytes would share them.
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    elements = tensor.view(-1).view(torch.uint8).numpy()
    elements[:] = content
    if dtype is torch.bool:
        _check_bools(elements)
    return tensor.requires_grad_(requires_grad)


def _parameter(
    content: memoryview, name: str, requires_grad: bool, *dimensions: object
) -> torch.nn.Parameter:
    return torch.nn.Parameter(_tensor(content, name, False, *dimensions), requires_grad)


_LEAF_OF: Final[dict[type, Leaf]] = {
    int: Leaf(
        Code.BIG_INT,
        _big_int_parts,
        lambda content: int.from_bytes(content, "little", signed=True),
    ),
    bytes: Leaf(Code.BYTES, _bytes_parts, bytes),
    bytearray: Leaf(Code.BYTEARRAY, _bytes_parts, bytearray),
    np.ndarray: Leaf(Code.NUMPY_ARRAY, _array_parts, _array),
    np.generic: Leaf(
        Code.NUMPY_SCALAR, _array_parts, lambda content, name: _array(content, name)[()]
    ),
    np.bytes_: Leaf(Code.NUMPY_BYTES, _bytes_parts, lambda content: np.bytes_(bytes(content))),
    torch.Tensor: Leaf(Code.TENSOR, _tensor_parts, _tensor),
    torch.nn.Parameter: Leaf(Code.PARAMETER, _tensor_parts, _parameter),
}
LEAVES: Final = {int(row.code): row for row in _LEAF_OF.values()} | {
    int(Code.PICKLE): Leaf(Code.PICKLE, _bytes_parts, pickle.loads)
}


def name_of(kind: type) -> str:
    """Return "module:qualname"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def unsupported_trait(obj: Any) -> str:
    """Return why a dataclass's object cannot be encoded by its fields; "" if it can."""
    kind = type(obj)
    # The receiver looks up the class by name.
    if _imported(name_of(kind)) is not kind:
        return "of a class that is not defined at the top of a module"
    # The items of a list or dict base are not fields.
    builtins = [base for base in kind.__mro__[1:-1] if base.__module__ == "builtins"]
    if builtins:
        return f"a subclass of {builtins[0].__name__}"
    fields = {field.name for field in dataclasses.fields(obj)}
    if extra := sorted(getattr(obj, "__dict__", {}).keys() - fields):
        return f"with attributes {extra}"
    return ""


def new_dataclass(name: str, values: dict[str, object]) -> Any:
    """Return an object of the named class with these values in its fields.

    Raises ObjectFormatError if no such dataclass is imported here, or its fields differ.
    """
    kind = _imported(name)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        module, _, qualname = name.partition(":")
        raise ObjectFormatError(
            f"the object holds a {module}.{qualname}, and no such dataclass is imported on this "
            f"rank: import {module} before it is received"
        )
    fields = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - fields):
        raise malformed(f"{type_name(kind)} has no field {', '.join(map(repr, unknown))} here")
    obj = object.__new__(kind)
    for field, value in values.items():
        object.__setattr__(obj, field, value)  # also works for frozen dataclasses
    return obj


def _imported(name: str) -> object:
    """Return the object of this name in an imported module, or None.

    Look it up in the __dict__s: getattr on a module or a class may call code.
    """
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found


class Step(NamedTuple):
    """One part of a composite; text.format(repr(key)) gives its place in it."""

    text: str
    key: object
    part: object


class Composite(NamedTuple):
    """The codec of a type that consists of objects."""

    code: Code
    to_parts: Callable[[Any], Iterable[Step]]
    from_parts: Callable[[list[Any]], Any]


def _items(sequence: Iterable[object]) -> Iterator[Step]:
    return (Step("[{}]", index, item) for index, item in enumerate(sequence))


def _members(members: Iterable[object]) -> Iterator[Step]:
    return (Step(" (member {})", member, member) for member in members)


def _pairs(mapping: dict[Any, Any]) -> Iterator[Step]:
    for key, value in mapping.items():
        # A key is a part of its own: it may be a tuple, say.
        yield Step(" (key {})", key, key)
        yield Step("[{}]", key, value)


def _attributes(*names: str) -> Callable[[object], Iterator[Step]]:
    return lambda obj: (Step(f".{name}", None, getattr(obj, name)) for name in names)


def _ordered_dict_parts(mapping: OrderedDict[Any, Any]) -> Iterator[Step]:
    """Yield the items and `_metadata`, where a module's state_dict keeps version numbers."""
    attributes = vars(mapping)
    if attributes.keys() - {"_metadata"}:
        raise UnsupportedError(f"with attributes {sorted(attributes)}")
    yield Step("._metadata", None, attributes.get("_metadata"))
    yield from _pairs(mapping)


def _default_dict_parts(mapping: defaultdict[Any, Any]) -> Iterator[Step]:
    # The factory will be called later, so a message may only choose harmless ones.
    if mapping.default_factory not in _FACTORY_NAMES:
        raise UnsupportedError(f"of {mapping.default_factory}")
    yield Step(".default_factory", None, _FACTORY_NAMES[mapping.default_factory])
    yield from _pairs(mapping)


def _variables(namespace: Any) -> Iterator[Step]:
    for name, value in vars(namespace).items():
        yield Step("", None, name)
        yield Step(f".{name}", None, value)


def _dataclass_parts(obj: Any) -> Iterator[Step]:
    if why := unsupported_trait(obj):
        raise UnsupportedError(why)
    yield Step("", None, name_of(type(obj)))
    for field in dataclasses.fields(obj):
        # A field may not have a value yet, as with init=False; then the receiver's has none either.
        if hasattr(obj, field.name):
            yield Step("", None, field.name)
            yield Step(f".{field.name}", None, getattr(obj, field.name))


def _set(parts: list[Any]) -> set[Any]:
    members = set(parts)
    if len(members) != len(parts):
        raise malformed("a set has a member twice")
    return members


def _dict(parts: list[Any]) -> dict[Any, Any]:
    mapping = dict(zip(parts[::2], parts[1::2], strict=True))
    if 2 * len(mapping) != len(parts):
        raise malformed("a dict has a key twice")
    return mapping


def _ordered_dict(parts: list[Any]) -> OrderedDict[Any, Any]:
    mapping = OrderedDict(_dict(parts[1:]))
    if parts[0] is not None:
        vars(mapping)["_metadata"] = parts[0]
    return mapping


def _string_dict(parts: list[Any]) -> dict[str, Any]:
    mapping = _dict(parts)
    if not all(isinstance(name, str) for name in mapping):
        raise malformed("a name is not a string")
    return mapping


def _namespace(kind: type) -> Callable[[list[Any]], Any]:
    def from_parts(parts: list[Any]) -> Any:
        namespace = kind()
        vars(namespace).update(_string_dict(parts))
        return namespace

    return from_parts


def _dataclass(parts: list[Any]) -> Any:
    name, *rest = parts
    if not isinstance(name, str):
        raise malformed("a dataclass has no name")
    return new_dataclass(name, _string_dict(rest))


def _complex(parts: list[Any]) -> complex:
    real, imaginary = parts
    return complex(real, imaginary)


def _single(make: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    def from_parts(parts: list[Any]) -> Any:
        (part,) = parts
        return make(part)

    return from_parts


def _torch_size(parts: list[Any]) -> torch.Size:
    return torch.Size(dimension(part) for part in parts)


_FACTORIES: Final[dict[str | None, Callable[[], Any] | None]] = {
    None: None,
    "list": list,
    "dict": dict,
    "set": set,
    "int": int,
    "float": float,
}
_FACTORY_NAMES: Final = {factory: name for name, factory in _FACTORIES.items()}

COMPOSITE_OF: Final[dict[type, Composite]] = {
    list: Composite(Code.LIST, _items, list),
    tuple: Composite(Code.TUPLE, _items, tuple),
    set: Composite(Code.SET, _members, _set),
    frozenset: Composite(Code.FROZENSET, _members, lambda parts: frozenset(_set(parts))),
    dict: Composite(Code.DICT, _pairs, _dict),
    OrderedDict: Composite(Code.ORDERED_DICT, _ordered_dict_parts, _ordered_dict),
    defaultdict: Composite(
        Code.DEFAULT_DICT,
        _default_dict_parts,
        lambda parts: defaultdict(_FACTORIES[parts[0]], _dict(parts[1:])),
    ),
    Counter: Composite(Code.COUNTER, _pairs, lambda parts: Counter(_dict(parts))),
    Namespace: Composite(Code.NAMESPACE, _variables, _namespace(Namespace)),
    SimpleNamespace: Composite(Code.SIMPLE_NAMESPACE, _variables, _namespace(SimpleNamespace)),
    # Path() is of the class that this system has: PosixPath, or WindowsPath.
    type(Path()): Composite(Code.PATH, lambda path: _items([str(path)]), _single(Path)),
    deque: Composite(
        Code.DEQUE,
        lambda items: _items([items.maxlen, *items]),
        lambda parts: deque(parts[1:], parts[0]),
    ),
    slice: Composite(Code.SLICE, _attributes("start", "stop", "step"), lambda parts: slice(*parts)),
    range: Composite(Code.RANGE, _attributes("start", "stop", "step"), lambda parts: range(*parts)),
    complex: Composite(Code.COMPLEX, _attributes("real", "imag"), _complex),
    np.str_: Composite(Code.NUMPY_STR, lambda text: _items([str.__str__(text)]), _single(np.str_)),
    torch.Size: Composite(Code.TORCH_SIZE, _items, _torch_size),
    torch.dtype: Composite(
        Code.TORCH_DTYPE,
        lambda dtype: _items([dtype_name(dtype)]),
        _single(TORCH_DTYPES.__getitem__),
    ),
    torch.device: Composite(
        Code.TORCH_DEVICE, lambda device: _items([str(device)]), _single(torch.device)
    ),
}
_DATACLASS: Final = Composite(Code.DATACLASS, _dataclass_parts, _dataclass)
COMPOSITES: Final = {int(row.code): row for row in (*COMPOSITE_OF.values(), _DATACLASS)}


def composite_of(obj: object) -> Composite | None:
    """Return the codec of an object's type; None if the type does not consist of objects."""
    own = COMPOSITE_OF.get(type(obj))
    is_dataclass_object = dataclasses.is_dataclass(obj) and not isinstance(obj, type)
    return _DATACLASS if own is None and is_dataclass_object else own
