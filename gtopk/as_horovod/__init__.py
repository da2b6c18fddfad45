"""gtopk under Horovod's names, for one process: `python -m gtopk.as_horovod script.py ...`.

    mpirun -n 4 python -m gtopk.as_horovod train.py --epochs 3
    torchrun --nproc-per-node 4 -m gtopk.as_horovod train.py --epochs 3
    python -m gtopk.as_horovod -m package.train

The script still says `import horovod.torch as hvd` and needs no change. An installed Horovod is
neither changed nor imported. Objects may be sent as pickles, as with Horovod, unless
GTOPK_ALLOW_PICKLE forbids it.

This module's finder answers every import of horovod with a module of gtopk, also in processes that
multiprocessing spawns. __main__.py is the command.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from types import ModuleType
from typing import Any, Final

from .. import settings

__all__ = ["install"]

# The version of Horovod whose API gtopk.torch follows.
HOROVOD_VERSION: Final = "0.28.1"

# Horovod's module and gtopk's; their submodules correspond by name.
_MODULES: Final = (
    ("horovod.common", "gtopk.common"),
    ("horovod.run.runner", "gtopk.runtime.runner"),  # until Horovod 0.20
    ("horovod.runner", "gtopk.runtime.runner"),
    ("horovod.torch", "gtopk.torch"),
)


def install() -> None:
    """Make every later import of horovod in this process return gtopk's modules.

    Raises RuntimeError if this process has already imported Horovod, or uses it as its transport.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    # Checked before anything is installed: a refusal must leave the process unchanged.
    if settings.TRANSPORT.read() == "horovod":
        raise RuntimeError(
            "GTOPK_TRANSPORT must not be 'horovod' under gtopk.as_horovod, which replaces Horovod: "
            "the real one cannot be imported; unset it"
        )
    if "horovod" in sys.modules:
        where = getattr(sys.modules["horovod"], "__file__", None)
        raise RuntimeError(
            f"horovod, from {where}, was imported before gtopk.as_horovod: install that first"
        )
    # First in the list: the other finders would find an installed Horovod.
    sys.meta_path.insert(0, Finder())


def patch_spawn() -> None:
    """Make all processes that multiprocessing spawns later run __main__.py as their script."""
    # Not in __main__.py: a spawned process replaces that module's names with the script's.
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = prepare(name)
        # With these left in, the child would run the script before gtopk replaces Horovod.
        path, module = data.pop("init_main_from_path", None), data.pop("init_main_from_name", None)
        if path or module:
            # Preparation data has no field for this; a spawned process inherits the environment.
            os.environ[settings.AS_HOROVOD_MAIN.name] = json.dumps([path, module])
            data["init_main_from_name"] = __name__
        return data

    spawn.get_preparation_data = get_preparation_data


def target_of(name: str) -> str | None:
    """Return gtopk's module for one of Horovod's, or None."""
    for horovod_name, gtopk_name in _MODULES:
        if name == horovod_name or name.startswith(f"{horovod_name}."):
            target = gtopk_name + name.removeprefix(horovod_name)
            return target if _exists(target) else None
    return None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not a package
        return False


class Finder(MetaPathFinder):
    """Finds gtopk's modules under Horovod's names, never Horovod's own; first in sys.meta_path.

    installed_by: the module with the `install` that adds it in another process; for gtopk.run.
    """

    installed_by = "gtopk.as_horovod"

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec for a name that is horovod or below it; None for any other."""
        if name.partition(".")[0] != "horovod":
            return None
        if name in ("horovod", "horovod.run"):
            return ModuleSpec(name, _NewModuleLoader(), is_package=True)
        module = target_of(name)
        if module is None:
            raise ModuleNotFoundError(
                f"No module named {name!r}: gtopk.as_horovod replaces horovod.torch, horovod.run "
                "and horovod.common, but no other part of Horovod",
                name=name,
            )
        return ModuleSpec(name, _AliasLoader(module))


class _AliasLoader(Loader):
    """Loads an existing module under a second name; both names refer to the same object."""

    def __init__(self, module: str) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: the import system makes a module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new module with gtopk's in sys.modules."""
        # The import system returns the entry in sys.modules, not the module that it created.
        sys.modules[module.__name__] = importlib.import_module(self._module)


class _NewModuleLoader(Loader):
    """Creates the two modules without a counterpart in gtopk: horovod, and the old horovod.run."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module; a callable one for horovod.run, which was once a package."""
        return _CallableModule(spec.name) if spec.name == "horovod.run" else ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Set the module's names."""
        from ..runtime.runner import run

        module.__dict__["run"] = run
        module.__dict__["__version__"] = HOROVOD_VERSION


class _CallableModule(ModuleType):
    """`horovod.run` after `import horovod.run.runner`; it can still be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["run"](*args, **kwargs)
