"""Composites: the types made of objects, and how each is taken apart and put together.

A dataclass is named in the message, looked up among imported modules, and filled field by field:
neither its __init__ nor its properties run, so a message cannot execute code that its sender chose.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from .format import (
    TORCH_DTYPES,
    Code,
    ObjectFormatError,
    UnsupportedError,
    dimension,
    dtype_name,
    malformed,
    type_name,
)


def is_dataclass_object(obj: object) -> bool:
    """Tell whether an object is of a dataclass."""
    return dataclasses.is_dataclass(obj) and not isinstance(obj, type)


def name_of(kind: type) -> str:
    """Return "module:qualname"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def why_not(obj: Any) -> str:
    """Return why a dataclass's object cannot be encoded by its fields; "": it can."""
    kind = type(obj)
    # The receiver will look the class up by its name.
    if _found(name_of(kind)) is not kind:
        return "of a class that is not defined at the top of a module"
    # The items of a list or a dict are in no field.
    native = [base for base in kind.__mro__[1:-1] if base.__module__ == "builtins"]
    if native:
        return f"a {native[0].__name__}, too"
    fields = {field.name for field in dataclasses.fields(obj)}
    if more := sorted(getattr(obj, "__dict__", {}).keys() - fields):
        return f"with attributes {more}"
    return ""


def fields_of(obj: Any) -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each field that is set."""
    for field in dataclasses.fields(obj):
        # A field may have no value yet, as with init=False; the receiver's has none then.
        if hasattr(obj, field.name):
            yield field.name, getattr(obj, field.name)


def import_module_of(name: str) -> None:
    """Import the module that a class is in."""
    importlib.import_module(name.partition(":")[0])


def filled(name: str, values: dict[str, object]) -> Any:
    """Return an object of the class of this name with these values in its fields.

    Raises ObjectFormatError where no such dataclass is imported here, or has other fields.
    """
    kind = _found(name)
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
        object.__setattr__(obj, field, value)  # works for frozen dataclasses, too
    return obj


def _found(name: str) -> object:
    """Return the object of a name in a module that is imported, or None.

    It is looked up in the __dict__s: getattr on a module or a class may call code.
    """
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found


class Step(NamedTuple):
    """One part of a composite; text.format(repr(key)) is its place there."""

    text: str
    key: object
    part: object


class Composite(NamedTuple):
    """The codec of a type made of objects: it takes it apart and puts it together."""

    code: Code
    take_apart: Callable[[Any], Iterable[Step]]
    put_together: Callable[[list[Any]], Any]


def _items(sequence: Iterable[object]) -> Iterator[Step]:
    return (Step("[{}]", index, item) for index, item in enumerate(sequence))


def _members(members: Iterable[object]) -> Iterator[Step]:
    return (Step(" (member {})", member, member) for member in members)


def _pairs(mapping: dict[Any, Any]) -> Iterator[Step]:
    for key, value in mapping.items():
        # A key is a part, too: it may be a tuple, say.
        yield Step(" (key {})", key, key)
        yield Step("[{}]", key, value)


def _attributes(*names: str) -> Callable[[object], Iterator[Step]]:
    return lambda obj: (Step(f".{name}", None, getattr(obj, name)) for name in names)


def _ordered_dict_parts(mapping: OrderedDict[Any, Any]) -> Iterator[Step]:
    """Yield the items and `_metadata`, in which a module's state_dict keeps version numbers."""
    attributes = vars(mapping)
    if attributes.keys() - {"_metadata"}:
        raise UnsupportedError(f"with attributes {sorted(attributes)}")
    yield Step("._metadata", None, attributes.get("_metadata"))
    yield from _pairs(mapping)


def _default_dict_parts(mapping: defaultdict[Any, Any]) -> Iterator[Step]:
    # The factory is called later on: only harmless ones may come from a message.
    if mapping.default_factory not in _FACTORY_NAMES:
        raise UnsupportedError(f"of {mapping.default_factory}")
    yield Step(".default_factory", None, _FACTORY_NAMES[mapping.default_factory])
    yield from _pairs(mapping)


def _variables(namespace: Any) -> Iterator[Step]:
    for name, value in vars(namespace).items():
        yield Step("", None, name)
        yield Step(f".{name}", None, value)


def _dataclass_parts(obj: Any) -> Iterator[Step]:
    if why := why_not(obj):
        raise UnsupportedError(why)
    yield Step("", None, name_of(type(obj)))
    for name, value in fields_of(obj):
        yield Step("", None, name)
        yield Step(f".{name}", None, value)


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


def _default_dict(parts: list[Any]) -> defaultdict[Any, Any]:
    return defaultdict(_FACTORIES[parts[0]], _dict(parts[1:]))


def _counter(parts: list[Any]) -> Counter[Any]:
    return Counter(_dict(parts))


def _named(parts: list[Any]) -> dict[str, Any]:
    mapping = _dict(parts)
    if not all(isinstance(name, str) for name in mapping):
        raise malformed("a name is no text")
    return mapping


def _namespace(kind: type) -> Callable[[list[Any]], Any]:
    def put_together(parts: list[Any]) -> Any:
        namespace = kind()
        vars(namespace).update(_named(parts))
        return namespace

    return put_together


def _dataclass(parts: list[Any]) -> Any:
    name, *rest = parts
    if not isinstance(name, str):
        raise malformed("a dataclass has no name")
    return filled(name, _named(rest))


def _complex(parts: list[Any]) -> complex:
    real, imaginary = parts
    return complex(real, imaginary)


def _numpy_str(parts: list[Any]) -> np.str_:
    (text,) = parts
    value: np.str_ = np.str_(text)
    return value


def _torch_size(parts: list[Any]) -> torch.Size:
    return torch.Size(dimension(part) for part in parts)


def _torch_dtype(parts: list[Any]) -> torch.dtype:
    (name,) = parts
    return TORCH_DTYPES[name]


def _torch_device(parts: list[Any]) -> torch.device:
    (name,) = parts
    return torch.device(name)


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
    defaultdict: Composite(Code.DEFAULT_DICT, _default_dict_parts, _default_dict),
    Counter: Composite(Code.COUNTER, _pairs, _counter),
    Namespace: Composite(Code.NAMESPACE, _variables, _namespace(Namespace)),
    SimpleNamespace: Composite(Code.SIMPLE_NAMESPACE, _variables, _namespace(SimpleNamespace)),
    slice: Composite(Code.SLICE, _attributes("start", "stop", "step"), lambda parts: slice(*parts)),
    range: Composite(Code.RANGE, _attributes("start", "stop", "step"), lambda parts: range(*parts)),
    complex: Composite(Code.COMPLEX, _attributes("real", "imag"), _complex),
    np.str_: Composite(Code.NUMPY_STR, lambda text: _items([str.__str__(text)]), _numpy_str),
    torch.Size: Composite(Code.TORCH_SIZE, _items, _torch_size),
    torch.dtype: Composite(
        Code.TORCH_DTYPE, lambda dtype: _items([dtype_name(dtype)]), _torch_dtype
    ),
    torch.device: Composite(Code.TORCH_DEVICE, lambda device: _items([str(device)]), _torch_device),
}
_OF_DATACLASSES: Final = Composite(Code.DATACLASS, _dataclass_parts, _dataclass)
COMPOSITES: Final = {int(row.code): row for row in (*COMPOSITE_OF.values(), _OF_DATACLASSES)}


def composite_of(obj: object) -> Composite | None:
    """Return the codec of an object's type; None where the type is not made of objects."""
    own = COMPOSITE_OF.get(type(obj))
    return _OF_DATACLASSES if own is None and is_dataclass_object(obj) else own
