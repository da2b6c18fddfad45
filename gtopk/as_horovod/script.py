"""Runs a script or a module as Python itself does, with its argv, __main__ and tracebacks."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a file, or a folder or archive that holds a __main__.py."""
    sys.argv[:] = [path, *arguments]
    if os.path.isdir(path) or _is_archive(path):
        _begin_path_with(os.path.abspath(path))
        _become_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    try:
        # As Python opens scripts: audit hooks see it.
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        _refuse(
            f"can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {error.strerror}", 2
        )
    _begin_path_with(os.path.dirname(os.path.realpath(path)))
    main = _become_main()
    main.__dict__.update(
        __file__=os.path.abspath(path),
        __cached__=None,
        __loader__=SourceFileLoader("__main__", path),
    )
    # dont_inherit: else this file's `from __future__` would hold for the script.
    exec(compile(source, os.path.abspath(path), "exec", dont_inherit=True), main.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module, or a package's __main__, found on sys.path."""
    sys.argv[:] = ["-m", *arguments]
    _become_main()
    # What `python -m` itself calls: runpy.run_module would put sys.argv and __main__ back at the
    # end.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _become_main() -> ModuleType:
    """Make a new module the process's __main__, and return it."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    sys.excepthook = _show
    return main


def _begin_path_with(folder: str) -> None:
    """Put a script's folder first in sys.path, in place of the one that -m has put there."""
    # With `python -P` there is no such entry.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    if importlib.util.find_spec("collectives") is None:  # gtopk was found in that other folder
        sys.path.append(str(Path(__file__).parents[2]))


def _is_archive(path: str) -> bool:
    return path.endswith((".zip", ".pyz")) and os.path.isfile(path)


def _refuse(text: str, code: int) -> NoReturn:
    print(f"{sys.executable}: {text}", file=sys.stderr)
    sys.exit(code)


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an uncaught exception without the frames above the script's."""
    trace = _without_own_frames(traceback)
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the script's first frame on, which follows gtopk's last one."""
    trace, own = traceback, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == __file__:
            own = trace
        trace = trace.tb_next
    return own.tb_next if own is not None else traceback
