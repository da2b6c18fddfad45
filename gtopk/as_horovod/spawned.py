"""Loads the script, with gtopk in Horovod's place, in a process spawned by multiprocessing."""

from __future__ import annotations

import json
import runpy

from gtopk import settings
from gtopk.as_horovod import install
from gtopk.as_horovod.children import follow

if __name__ == "__mp_main__":
    install()
    follow()
    _path, _module = json.loads(settings.AS_HOROVOD_MAIN.read())
    _script = (
        runpy.run_path(_path, run_name=__name__)
        if _path
        else runpy.run_module(_module, run_name=__name__, alter_sys=True)
    )
    # The child's __main__ gets these names: pickles of the parent look the script's classes up
    # there.
    globals().update(_script)
