"""What the installed CuPy has, without a GPU: names on stdin as JSON, their signatures on stdout.

A name is described by null where it is missing, by [] where it cannot be called, and else by its
parameters: (name, kind, whether it may be left out). Warnings are errors.
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
    """Return what a callable takes; Cython writes it into the first line of the docstring."""
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
    """Return the parameters of a signature in Cython's words: `self, int peer, str path=None`."""
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
    """Return what a dotted name is; see above."""
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
    """Return the numbers that NCCL knows types and operators by."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    return {name: value for name, value in vars(nccl).items() if name.startswith("NCCL_")}


def drop_a_foreign_stream() -> list[str]:
    """Return what CuPy complains of when a stream of another library's, none here, goes out of use.

    To destroy it would be an error of the driver, which is missing here.
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
    sys.setdlopenflags(os.RTLD_LAZY)  # an empty libnccl will do: nothing of it is called
    importlib.import_module("cupy.cuda.nccl")
    found = {
        "names": {name: describe(name) for name in json.load(sys.stdin)},
        "constants": constants(),
        "complaints": drop_a_foreign_stream(),
    }
    json.dump(found, sys.stdout)
