"""Pickles, for objects of other types: only where GTOPK_ALLOW_PICKLE is 1, since they execute."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
from typing import Any

from ... import settings


def pickle_allowed() -> bool:
    """Return whether this process writes and executes pickles: GTOPK_ALLOW_PICKLE=1."""
    return settings.ALLOW_PICKLE.read()


def pickler() -> Any:
    """Return cloudpickle, which knows lambdas and local classes, where it is installed."""
    found = importlib.util.find_spec("cloudpickle")
    return importlib.import_module("cloudpickle") if found else pickle
