"""The hosts of a job: their names, how many ranks each takes, and whether they are this one."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Host(NamedTuple):
    """A host and how many ranks it takes."""

    name: str
    slots: int

    @property
    def is_this_one(self) -> bool:
        """Tell whether the name means the host that this process is on."""
        own = socket.gethostname()
        return self.name in ("localhost", "127.0.0.1", own, own.split(".")[0])


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts in "one:4,two:2"; a name alone takes one rank."""
    hosts = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([^\s:,]+)(?::(\d+))?\s*", word)
        if match is None or match[2] == "0":
            raise ValueError(f"hosts must look like 'one:4,two:2', got {text!r}")
        hosts.append(Host(match[1], int(match[2] or 1)))
    return hosts


def read_hostfile(path: str | Path) -> list[Host]:
    """Return the hosts of a file with a line "name slots=4" for each; # begins a comment."""
    hosts = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = re.fullmatch(r"([^\s:]+)(?:\s+slots\s*=\s*([1-9]\d*))?", words)
        if match is None:
            raise ValueError(f"a line of {path} must look like 'name slots=4', got {line!r}")
        hosts.append(Host(match[1], int(match[2] or 1)))
    if not hosts:
        raise ValueError(f"{path} must name a host, and names none")
    return hosts


def refuse_too_few_slots(hosts: Sequence[Host], ranks: int) -> None:
    """Raise ValueError where the hosts take fewer ranks than there are."""
    slots = sum(host.slots for host in hosts)
    if slots < ranks:
        named = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"{ranks} ranks need as many slots, and the hosts ({named}) have {slots}; give a host "
            "more as name:slots"
        )
