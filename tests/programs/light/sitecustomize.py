"""On the path of a started Python, make torch load its compiler's parts only when they are needed.

Of 2.6 s of CPU time, torch spends 1.1 s on loading the shapes and decompositions of all operators
and the program exporter. Each optimizer also loads the compiler, only to be excluded from it:
another 1.2 s. Garbage collection of what is loaded takes 0.5 s, most of it at the process's end.

It also prints where the threads of a Python wait that will soon be killed by a timeout.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _disable(function: Callable[..., Any] | None = None, *how: Any, **more: Any) -> Any:
    """Return the function unchanged: nothing is compiled."""
    return (lambda inner: inner) if function is None else function


_SHAPES = "torch._meta_registrations"  # torch loads this last
# Packages that are loaded once somebody uses anything else in them.
_LATE: dict[str, dict[str, Any]] = {
    "torch.export": {},
    "torch._dynamo": {"disable": _disable, "graph_break": lambda *arguments: None},
    _SHAPES: {},
}


def _load(name: str) -> ModuleType:
    """Load a deferred package; a compiler needs the shapes, loaded before it as by torch."""
    for each in (*([_SHAPES] if name == "torch._dynamo" else []), name):
        if _LATE.pop(each, None) is not None:
            sys.modules.pop(each, None)
            importlib.import_module(each)
    return sys.modules[name]


class _Found:
    """Returns a module that is already loaded."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it is already executed."""


def _uncollected(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Load a module without garbage collection, and exempt it from later ones."""
    loader: Any = spec and spec.loader
    if not loader or not gc.isenabled():
        return spec
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        gc.disable()
        try:
            load(module)
        finally:
            gc.enable()
        gc.freeze()

    loader.exec_module = exec_module
    return spec


class _Finder:
    """Finds nearly empty modules instead of the deferred ones."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torch":
            return _uncollected(PathFinder.find_spec(name, path))
        package = name.rpartition(".")[0]
        loader: Any = self if name in _LATE else None
        if package in _LATE:
            _load(package)
            loader = _Found() if name in sys.modules else None
        return loader and importlib.util.spec_from_loader(name, loader)

    def create_module(self, spec: ModuleSpec) -> None:
        """Use an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        name, torch = module.__name__, sys.modules["torch"]

        def missing(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)  # code that inspects all modules needs none of this
            return getattr(_load(name), attribute)

        vars(module).update(_LATE[name], __getattr__=missing, __file__=__file__)
        if name == _SHAPES:
            if hasattr(torch._C, "_set_generator_metaclass"):  # saves decompositions 0.3 s
                from torch._opaque_base import OpaqueBaseMeta

                torch._C._set_generator_metaclass(OpaqueBaseMeta)
        else:
            module.__path__ = [f"{folder}/{name.rpartition('.')[2]}" for folder in torch.__path__]


if not any(type(finder).__name__ == "_Finder" for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]

if _late := os.environ.get("STACKS_AFTER_SECONDS"):
    faulthandler.dump_traceback_later(float(_late))
