"""The command `python -m gtopk.as_horovod`."""

from __future__ import annotations

import os
import sys
from typing import Final

from .. import settings
from . import script
from .children import follow
from .finder import install

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
    # Horovod's scripts send any object, as pickles. In the environment, so that children do, too.
    os.environ[name] = os.environ.get(name) or "1"
    install()
    follow()
    if is_module:
        script.run_module(words[1], words[2:])
    else:
        script.run_script(words[0], words[1:])


if __name__ == "__main__":
    main()
