"""The command `python -m gtopk.as_horovod`: runs a script or a module as Python itself does.

The script sees the same argv, __main__ and tracebacks as under Python. Processes that it spawns
with multiprocessing load the script again; they run this module as their script, so that they, too,
import gtopk in place of Horovod. The workers of a DataLoader with
multiprocessing_context="forkserver", as in Horovod's own examples, are such processes. Forked
processes need nothing.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import json
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Final

from gtopk import settings
from gtopk.as_horovod import install, patch_spawn

_USAGE: Final = "usage: python -m gtopk.as_horovod (SCRIPT | -m MODULE) [ARGUMENTS]"


def main() -> None:
    """Run the script or module of the command line on gtopk under Horovod's names."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(f"{_USAGE}\n\nRuns a script that imports horovod.torch, unchanged, on gtopk.")
        return
    is_module = words[:1] == ["-m"]
    if len(words) < 1 + is_module or (words[0].startswith("-") and not is_module):
        print(_USAGE, file=sys.stderr)
        sys.exit(2)
    name = settings.ALLOW_PICKLE.name
    # Horovod's scripts send any object as a pickle. Children inherit the environment.
    os.environ[name] = os.environ.get(name) or "1"
    install()
    patch_spawn()
    if is_module:
        sys.argv[:] = ["-m", *words[2:]]
        _become_main()
        # `python -m` itself calls this; runpy.run_module would restore sys.argv and __main__ at
        # the end.
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        run_script(words[0], words[1:])


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a file, or a folder or archive with a __main__.py."""
    sys.argv[:] = [path, *arguments]
    if os.path.isdir(path) or (path.endswith((".zip", ".pyz")) and os.path.isfile(path)):
        _put_first_in_path(os.path.abspath(path))
        _become_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    try:
        # Python opens scripts like this, and audit hooks expect it.
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        what = f"can't open file {os.path.abspath(path)!r}"
        why = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: {what}: {why}", file=sys.stderr)
        sys.exit(2)
    _put_first_in_path(os.path.dirname(os.path.realpath(path)))
    main = _become_main()
    main.__dict__.update(
        __file__=os.path.abspath(path),
        __cached__=None,
        __loader__=SourceFileLoader("__main__", path),
    )
    # Without dont_inherit, this file's `from __future__` would apply to the script.
    exec(compile(source, os.path.abspath(path), "exec", dont_inherit=True), main.__dict__)


def _become_main() -> ModuleType:
    """Replace the process's __main__ with a new module, and return it."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    sys.excepthook = _hook
    return main


def _put_first_in_path(folder: str) -> None:
    """Put a script's folder first in sys.path, in place of the entry that -m added."""
    # `python -P` adds no such entry.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    if importlib.util.find_spec("collectives") is None:  # the old entry had led to gtopk
        sys.path.append(str(Path(__file__).parents[2]))


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an uncaught exception without this file's frames, as Python would for the script."""
    trace, last_own = traceback, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == __file__:
            last_own = trace
        trace = trace.tb_next
    shown = last_own.tb_next if last_own is not None else traceback
    sys.__excepthook__(kind, error.with_traceback(shown), shown)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    install()
    patch_spawn()
    _path, _module = json.loads(settings.AS_HOROVOD_MAIN.read())
    _script = (
        runpy.run_path(_path, run_name=__name__)
        if _path
        else runpy.run_module(_module, run_name=__name__, alter_sys=True)
    )
    # Pickles from the parent look up the script's classes in the child's __main__.
    globals().update(_script)
