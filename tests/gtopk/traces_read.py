"""The records in a timeline's file, also while it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def records_in(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file that must be complete JSON, whenever nothing is writing."""
    text = ""
    while text != (text := path.read_text()):  # a read beside a write may see some of both
        pass
    first, *records = json.loads(text)
    assert first == {}
    return records


def rows_in(path: Path) -> dict[str, list[str]]:
    """Return the records of each row in the order of time: >begin, <end, a rank that is ready."""
    names: dict[int, str] = {}
    rows: dict[str, list[str]] = {}
    for record in records_in(path):
        if record["name" if "name" in record else "ph"] == "process_name":
            names[record["pid"]] = record["args"]["name"]
        elif record["ph"] in "BEX":
            mark = {"B": ">", "E": "<", "X": ""}[record["ph"]] + record.get("name", "")
            rows.setdefault(names[record["pid"]], []).append(mark)
    return rows
