"""Dataclasses: told by their names, found where they are imported, filled without a call.

The class is looked up as it is defined, field by field is set: neither its __init__ nor a property
of it runs, so that a message executes nothing that its sender chose.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .format import ObjectFormatError, malformed, type_name


def is_dataclass_object(obj: object) -> bool:
    """Tell whether an object is of a dataclass."""
    return dataclasses.is_dataclass(obj) and not isinstance(obj, type)


def name_of(kind: type) -> str:
    """Return "module:qualname"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def why_not(obj: Any) -> str:
    """Return what keeps an object of a dataclass from being told by its fields; "": nothing."""
    kind = type(obj)
    if _found(name_of(kind)) is not kind:
        return "of a class that is not defined at the top of a module"
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
        object.__setattr__(obj, field, value)  # of a frozen one, too
    return obj


def _found(name: str) -> object:
    """Return what is defined under a name in a module that is imported, or None.

    By the namespaces themselves: to ask a module or a class for an attribute may call code.
    """
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found
