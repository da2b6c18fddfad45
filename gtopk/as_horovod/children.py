"""Makes processes that multiprocessing spawns find gtopk in Horovod's place, too.

They load the script anew. A DataLoader's workers with multiprocessing_context="forkserver" are such
processes, and Horovod's own examples use them. Forked processes need nothing.
"""

from __future__ import annotations

import json
import os
from multiprocessing import spawn
from typing import Any, Final

from .. import settings

_SPAWNED: Final = "gtopk.as_horovod.spawned"


def follow() -> None:
    """Make every process that multiprocessing spawns from now on load `spawned` as its script."""
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        told = prepare(name)
        # Both are taken out: else the child would run the script before gtopk stands for Horovod.
        path, module = told.pop("init_main_from_path", None), told.pop("init_main_from_name", None)
        if path or module:
            # Preparation data has no place for it, and a spawned process inherits the environment.
            os.environ[settings.AS_HOROVOD_MAIN.name] = json.dumps([path, module])
            told["init_main_from_name"] = _SPAWNED
        return told

    spawn.get_preparation_data = get_preparation_data
