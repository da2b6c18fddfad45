"""One thing the doctor looked at, and what came of it."""

from __future__ import annotations

from enum import Enum
from importlib import util
from typing import Final, NamedTuple

# What pip installs gtopk from, in the folder of a clone; "gtopk" once it is published.
PACKAGE: Final = "."


class State(str, Enum):
    """OK; WARN: training works, but mind this; MISSING: optional, and not there; FAIL: in the way.

    Where a report has a FAIL, several ranks cannot train here, and the exit code says so.
    """

    OK = "OK"
    WARN = "WARN"
    MISSING = "MISSING"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """A line of the report; `advice` says what to run, and is "" where all is well."""

    name: str
    state: State
    detail: str
    advice: str = ""


def installed(module: str) -> bool:
    """Tell whether a top-level module can be found, without importing it."""
    return util.find_spec(module) is not None


def gist(output: str) -> str:
    """Return the line that says most of what a failed program printed; "" when it was silent."""
    lines = [line.strip() for line in output.splitlines()]
    said = [line for line in lines if any(character.isalpha() for character in line)]
    if not said:
        return ""
    # Python says it last, mpirun first.
    line = said[-1] if any(line.startswith("Traceback") for line in said) else said[0]
    return line if len(line) <= 160 else f"{line[:157]}..."
