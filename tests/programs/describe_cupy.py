"""Describe the installed CuPy without a GPU: names as JSON on stdin, their signatures on stdout.

A missing name is described by null, one that is not callable by [], and any other by its
parameters: (name, kind, whether it is optional). Warnings are errors.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
import warnings
from typing import Any

ATTRIBUTE_OF_OBJECTS = r"~(?:\w+\.)*%s\b"  # as a class's docstring lists them


def parameters(thing: Any) -> list[tuple[str, str, bool]] | None:
    """Return a callable's parameters; Cython puts them in the first line of the docstring."""
    try:
        signature = inspect.signature(thing)
    except ValueError:
        first = (thing.__doc__ or "").partition("\n")[0]
        found = re.fullmatch(r"[\w.]+\((.*)\)(?: -> .*)?", first)
        return None if found is None else of_text(found[1])
    listed = [
        (p.name, p.kind.name, p.default is not p.empty) for p in signature.parameters.values()
    ]
    return [each for each in listed if each[0] not in ("self", "cls")]


def of_text(text: str) -> list[tuple[str, str, bool]]:
    """Return the parameters of a Cython signature such as `self, int peer, str path=None`."""
    kind, found = "POSITIONAL_OR_KEYWORD", []
    for part in filter(None, re.split(r",\s*(?![^(\[{]*[)\]}])", text)):
        if part == "*":
            kind = "KEYWORD_ONLY"
        elif part == "/":
            found = [(name, "POSITIONAL_ONLY", optional) for name, _, optional in found]
        else:
            name = part.partition("=")[0].split(":")[0].split()[-1]
            stars = len(name) - len(name.lstrip("*"))
            kinds = (kind, "VAR_POSITIONAL", "VAR_KEYWORD")
            found.append((name.lstrip("*"), kinds[stars], "=" in part))
    return [each for each in found if each[0] not in ("self", "cls")]


def describe(name: str) -> list[tuple[str, str, bool]] | None:
    """Describe a dotted name; see above."""
    module, _, rest = name.partition(".")
    thing: Any = importlib.import_module(module)
    for part in filter(None, rest.split(".")):
        if not hasattr(thing, part):
            doc = inspect.isclass(thing) and (thing.__doc__ or "")
            return [] if doc and re.search(ATTRIBUTE_OF_OBJECTS % part, doc) else None
        thing = getattr(thing, part)
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
        return []
    found = parameters(thing)
    return [("unknown", "VAR_POSITIONAL", True)] if found is None else found


def constants() -> dict[str, int]:
    """Return NCCL's numbers of types and operators."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    return {name: value for name, value in vars(nccl).items() if name.startswith("NCCL_")}


def drop_a_foreign_stream() -> list[str]:
    """Return CuPy's complaints when another library's stream (a null one) is released.

    Destroying it would be an error, as there is no driver.
    """
    complaints: list[str] = []
    sys.unraisablehook = lambda given: complaints.append(repr(given.exc_value))
    from collectives.kernels.device import cuda

    stream = cuda.cupy().cuda.Stream.from_external(cuda.ForeignStream(4711))
    address = stream.ptr
    del stream
    return complaints if address == 4711 else [f"address {address}"]


if __name__ == "__main__":
    warnings.simplefilter("error")
    sys.setdlopenflags(os.RTLD_LAZY)  # an empty libnccl suffices: nothing in it is called
    importlib.import_module("cupy.cuda.nccl")
    found = {
        "names": {name: describe(name) for name in json.load(sys.stdin)},
        "constants": constants(),
        "complaints": drop_a_foreign_stream(),
    }
    json.dump(found, sys.stdout)
