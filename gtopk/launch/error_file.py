"""The error file: where torchrun looks for what a rank failed with, and when, to name the first."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_PATH: Final = "TORCHELASTIC_ERROR_FILE"


def write_error_file(
    text: str, error: BaseException, environ: Mapping[str, str] = os.environ
) -> None:
    """Tell torchrun what this rank failed with; without torchrun, do nothing."""
    path = environ.get(_PATH)
    if not path:
        return
    stack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # it ends anyway, and has said why
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
