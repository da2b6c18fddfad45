"""What stands in for the script in a process that multiprocessing has spawned: the script."""

from __future__ import annotations

import json
import os
import runpy

from gtopk.as_horovod import install
from gtopk.as_horovod.children import MAIN, follow

if __name__ == "__mp_main__":
    install()
    follow()
    _path, _module = json.loads(os.environ[MAIN])
    _script = (
        runpy.run_path(_path, run_name=__name__)
        if _path
        else runpy.run_module(_module, run_name=__name__, alter_sys=True)
    )
    globals().update(_script)
