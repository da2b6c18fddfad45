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
_CONSEQUENCE_SECONDS: Final = 10  # within which torchrun notices a rank's end


def write_error_file(
    text: str, error: BaseException | None, environ: Mapping[str, str] = os.environ
) -> None:
    """Tell torchrun what this rank failed with; without torchrun, do nothing.

    error: with its traceback; None: another rank is the cause. Then the failure is dated later:
    torchrun calls the earliest the root cause, and dates who was killed when it notices.
    """
    path = environ.get(_PATH)
    if not path:
        return
    when = int(time.time())
    extra = {"timestamp": str(when + _CONSEQUENCE_SECONDS)}
    if error is not None:
        stack = "".join(traceback.format_exception(error))
        extra = {"py_callstack": f"{text}\n{stack}", "timestamp": str(when)}
    with contextlib.suppress(OSError):  # it ends anyway, and has said why
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
