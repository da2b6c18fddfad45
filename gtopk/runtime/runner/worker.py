"""A rank of gtopk.run: fetches the call, makes it and reports the outcome."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Final

from ... import settings
from .. import standard_streams
from ..launch import launched_by
from .call_server import fetch_call

# Starts a rank without gtopk on its path: argv is [-c, the folder that contains gtopk].
BEGIN: Final = (
    "import sys; sys.path.insert(0, sys.argv.pop()); "
    "from gtopk.runtime.runner.worker import main; main()"
)
_OWN_FRAMES: Final = 2  # frames of main and call.execute, above the function's own


def main() -> None:
    """Fetch the call from the server in the environment, make it, and report the outcome."""
    job = launched_by()
    rank, ranks = (job.rank, job.size) if job else (0, 1)
    # Also removes them: programs that the function starts must not see the secret.
    address, secret = settings.RUN_ADDRESS.take(), settings.RUN_SECRET.take()
    if folder := settings.RUN_OUTPUT.take():
        _redirect_output(Path(folder) / f"rank.{rank:0{len(str(ranks - 1))}}")
    connection, preparation, content = fetch_call(address, secret, rank)

    # This imports torch: by now the call server knows that this rank has started.
    from multiprocessing import spawn

    from ... import __version__
    from .. import object_codec as objects
    from . import call

    prepared = objects.decode(preparation, allow_pickle=False)
    allow_pickle = prepared["allow_pickle"]
    try:
        if prepared["version"] != __version__:
            raise ImportError(
                f"this rank found gtopk {__version__}, and was started by {prepared['version']}; "
                "install the same version on every host"
            )
        for module in prepared["to_install"]:
            importlib.import_module(module).install()
        # From here on, imports work as in the process that sent the call.
        spawn.prepare(prepared["surroundings"])
        report = call.result_report(call.execute(content, allow_pickle), allow_pickle)
    except BaseException as error:
        report = call.error_report(error, _OWN_FRAMES)
    # Flush first: after the report the caller may end this process.
    standard_streams.flush()
    connection.send(report)
    connection.close()


def _redirect_output(folder: Path) -> None:
    """Redirect output of this process and its children into files, bypassing the launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
