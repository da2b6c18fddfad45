"""Converts objects to JSON and named tensors, and back, for a checkpoint's files.

    {"model": {"weight": tensor}, "betas": (0.9, inf), "state": {0: "x"}}

    JSON     {"model": {"weight": {"$tensor": "model.weight"}},
              "betas": {"$tuple": [0.9, {"$float": "inf"}]},
              "state": {"$dict": [[0, "x"]]}}
    tensors  model.weight

A type that JSON lacks becomes an object with a first key that begins with "$":

    $tensor $array      the name of a tensor; $array if it was a NumPy array
    $tuple $dict        a tuple's items; the pairs of a dict with other keys than plain text
    $ordered $metadata  an OrderedDict, and the versions that a module's state_dict keeps in it
    $float              a float that is not finite
    $object             any other type that the object codec supports: its bytes in base64
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from ...errors import DamagedError
from ...runtime.object_codec import MAX_DEPTH, decode, encode

Json: TypeAlias = Any

# Dtypes that torch and every release of safetensors support, with safetensors' names.
DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ARRAYS: Final = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"}
_ARRAYS_AS: Final = {"uint32": "int32", "uint64": "int64", "uint16": "int16"}  # the same bits


class Flattened(NamedTuple):
    """An object as JSON and tensors; these are dense, on the host, and may share its memory."""

    tree: Json
    tensors: dict[str, torch.Tensor]


def flatten(obj: object, *, copy: bool = False) -> Flattened:
    """Return the object as JSON and tensors.

    copy: copy tensors on the host, so that the originals may change afterwards.
    Raises TypeError for anything that the object codec cannot encode either; it names the path.
    """
    flattener = _Flattener(copy)
    return Flattened(flattener.convert(obj, ()), flattener.tensors)


class _Flattener:
    """Converts one object; a tensor that occurs several times is stored once."""

    def __init__(self, copy: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._copy = copy
        self._names: dict[tuple[object, ...], str] = {}

    def convert(self, obj: Any, path: tuple[str, ...]) -> Json:
        kind = type(obj)
        if len(path) > MAX_DEPTH:
            raise TypeError(f"{_place(path)} is nested more than {MAX_DEPTH} deep")
        if obj is None or kind in (bool, str) or (kind is int and -(2**63) <= obj < 2**64):
            return obj
        if kind is float:
            return obj if math.isfinite(obj) else {"$float": repr(obj)}
        if kind is list:
            return self._items(obj, path)
        if kind is tuple:
            return {"$tuple": self._items(obj, path)}
        if kind is dict:
            return self._mapping(obj, path)
        if kind is OrderedDict and vars(obj).keys() <= {"_metadata"}:
            metadata = self.convert(vars(obj).get("_metadata"), (*path, "$metadata"))
            return {"$ordered": self._mapping(obj, path), "$metadata": metadata}
        if _is_storable(obj):
            return {"$tensor": self._store(obj, path)}
        if kind is np.ndarray and (values := _as_tensor(obj)) is not None:
            return {"$array": self._add(values, path), "$dtype": obj.dtype.name}
        try:
            content = encode(obj)
        except TypeError as error:
            raise TypeError(f"{_place(path)}: {error}") from None
        return {"$object": b64encode(content).decode()}

    def _items(self, items: Any, path: tuple[str, ...]) -> list[Json]:
        return [self.convert(item, (*path, str(place))) for place, item in enumerate(items)]

    def _mapping(self, mapping: Mapping[Any, Any], path: tuple[str, ...]) -> Json:
        # On reading, a key that begins with "$" would be taken for a type mark.
        if all(type(key) is str and not key.startswith("$") for key in mapping):
            return {key: self.convert(value, (*path, key)) for key, value in mapping.items()}
        pairs = [
            [self.convert(key, (*path, "$key")), self.convert(value, (*path, str(key)))]
            for key, value in mapping.items()
        ]
        return {"$dict": pairs}

    def _store(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        """Store the tensor unless it is stored already; return its name."""
        # Compare memory, not objects: state_dict() returns a new tensor object for each key of
        # tied weights.
        storage = tensor.device, tensor.untyped_storage().data_ptr()
        bits = tensor.is_conj(), tensor.is_neg()
        place = tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
        view = (*storage, *bits, *place)
        # Empty tensors have no distinct address and would all look the same.
        if tensor.numel() and view in self._names:
            return self._names[view]
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if self._copy and dense.data_ptr() == tensor.data_ptr():
            dense = dense.clone()
        name = self._names[view] = self._add(dense, path)
        return name

    def _add(self, dense: torch.Tensor, path: tuple[str, ...]) -> str:
        """Store a tensor under a new name, and return the name."""
        # safetensors rejects a lone surrogate, as Python makes from a file name that is not UTF-8.
        # The JSON holds the original key, so an escaped name does no harm.
        name = base = ".".join(path).encode(errors="backslashreplace").decode()
        number = 1
        while name in self.tensors:  # keys "a.b", "c" and keys "a", "b.c" give the same name
            number += 1
            name = f"{base}~{number}"
        self.tensors[name] = dense
        return name


def _is_storable(obj: object) -> bool:
    return (
        type(obj) is torch.Tensor
        and obj.layout is torch.strided
        and obj.dtype in DTYPES
        and obj.device.type != "meta"
        and not (obj.requires_grad or obj.is_nested)
    )


def _as_tensor(array: np.ndarray) -> torch.Tensor | None:
    """Return a copy of an array as a tensor; None if torch lacks its dtype."""
    name = array.dtype.name
    if not array.dtype.isnative or not (name in _ARRAYS or name in _ARRAYS_AS):
        return None
    # Earlier releases of safetensors lack some unsigned dtypes: store their bits as signed ones.
    return torch.from_numpy(np.array(array, order="C").view(_ARRAYS_AS.get(name, name)))


def _place(path: tuple[str, ...]) -> str:
    return ".".join(path) or "the object"


def unflatten(tree: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Reverse `flatten`; the tensors are used without a copy.

    Raises DamagedError for a tree that `flatten` cannot have returned.
    """
    try:
        return _unflatten(tree, tensors)
    except DamagedError:
        raise
    # A correct checksum shows that the file is unchanged, not that gtopk wrote it.
    except RecursionError:
        raise DamagedError("it is nested too deep") from None
    except (ArithmeticError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedError(f"{type(error).__name__}: {str(error)[:200]}") from error


def _unflatten(tree: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    # The first key is enough: `convert` writes no plain dict with a key that begins with "$".
    mark = next(iter(tree), "")
    if not mark.startswith("$"):
        return {key: _unflatten(value, tensors) for key, value in tree.items()}
    if mark not in _MARKS:
        raise DamagedError(f"the mark {mark!r} is unknown")
    return _MARKS[mark](tree, tensors)


def _unflatten_array(tree: Json, tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    name = tree["$dtype"]
    values: np.ndarray = tensors[tree["$array"]].numpy()
    if name not in _ARRAYS | _ARRAYS_AS.keys() or _ARRAYS_AS.get(name, name) != values.dtype.name:
        raise DamagedError(f"an array of {name!r} is stored as {values.dtype}")
    return values.view(name)


def _unflatten_ordered(tree: Json, tensors: Mapping[str, torch.Tensor]) -> OrderedDict[Any, Any]:
    mapping = OrderedDict(_unflatten(tree["$ordered"], tensors))
    metadata = _unflatten(tree["$metadata"], tensors)
    if metadata is not None:
        vars(mapping)["_metadata"] = metadata
    return mapping


_MARKS: Final[dict[str, Callable[[Json, Mapping[str, torch.Tensor]], Any]]] = {
    "$tensor": lambda tree, tensors: tensors[tree["$tensor"]],
    "$array": _unflatten_array,
    "$tuple": lambda tree, tensors: tuple(_unflatten(tree["$tuple"], tensors)),
    "$dict": lambda tree, tensors: {
        _unflatten(key, tensors): _unflatten(value, tensors) for key, value in tree["$dict"]
    },
    "$ordered": _unflatten_ordered,
    "$float": lambda tree, tensors: float(tree["$float"]),
    "$object": lambda tree, tensors: decode(b64decode(tree["$object"], validate=True)),
}
