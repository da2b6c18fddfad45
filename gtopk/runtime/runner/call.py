"""The call that every rank makes: the function by its name, the arguments as typed msgpack.

A function travels as module:qualname; one of the script itself, as "__main__:qualname" with the
script's path, which each rank loads as multiprocessing's spawn does (under the name __mp_main__:
what stands below `if __name__ == "__main__":` is not run again).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from operator import attrgetter
from typing import Any, Final

from ... import __version__
from .. import object_codec as objects

# Of what multiprocessing tells a process that it spawns: what makes imports work there as here.
_SURROUNDINGS: Final = (
    *("sys_path", "sys_argv", "dir", "init_main_from_name", "init_main_from_path"),
)
_ALLOW: Final = (
    "a pickle can carry it, and can execute anything where it is received: "
    "gtopk.run(..., allow_pickle=True), or GTOPK_ALLOW_PICKLE=1, allows that"
)


def pack(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    allow_pickle: bool,
    to_install: Sequence[str],
) -> tuple[bytes, bytes]:
    """Return the bytes of what a rank needs before it can import anything, and of the call.

    to_install: modules whose `install` the ranks call before they import anything else.
    Raises TypeError for what cannot travel without a pickle, where none is allowed.
    """
    here = spawn.get_preparation_data("gtopk.run")
    surroundings = {name: here[name] for name in _SURROUNDINGS if name in here}
    where = reference(
        func, in_script="init_main_from_name" in here or "init_main_from_path" in here
    )
    if where is None and not allow_pickle:
        raise TypeError(
            f"gtopk.run sends a function by its name, and {func!r} has none under which another "
            f"process could import it: define it with def at the top of a module or script; or "
            f"{_ALLOW}"
        )
    call = {"function": func if where is None else where, "args": list(args), "kwargs": {**kwargs}}
    try:
        content = objects.encode(call, allow_pickle=allow_pickle)
    except TypeError as error:
        if allow_pickle:
            raise
        raise TypeError(
            f"gtopk.run: {error}; for this call alone, allow_pickle=True does"
        ) from None
    needs_script = b"__main__:" in content or objects.holds_pickle(content)
    if not needs_script:
        surroundings = {k: v for k, v in surroundings.items() if not k.startswith("init_main")}
    preparation = {
        "version": __version__,
        "surroundings": surroundings,
        "allow_pickle": allow_pickle,
        "to_install": list(to_install),
    }
    return objects.encode(preparation, allow_pickle=False), content


def reference(func: Callable[..., Any], in_script: bool) -> str | None:
    """Return "module:qualname" if that names this very function, else None.

    in_script: whether other processes can load this one's __main__.
    """
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
    if module is None or name is None or (module == "__main__" and not in_script):
        return None
    where = f"{module}:{name}"
    try:
        return where if resolve(where) is func else None
    except (ImportError, AttributeError):
        return None


def resolve(where: str) -> Any:
    """Return what "module:qualname" names."""
    module, _, name = where.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def surround(surroundings: dict[str, Any]) -> None:
    """Make imports work in this process as they do in the one that sent the call."""
    spawn.prepare(surroundings)


def make(content: bytes, allow_pickle: bool) -> Any:
    """Make the call, and return what it returns."""
    # Who sends the call says what is imported and called here, authenticated by the job's secret.
    call = objects.decode(content, allow_pickle=allow_pickle, imports=True)
    function = call["function"]
    if isinstance(function, str):
        function = resolve(function)
    return function(*call["args"], **call["kwargs"])
