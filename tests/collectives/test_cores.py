"""How many cores a process may really use."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from collectives import cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_hardware_threads_of_a_core_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for thread, siblings in enumerate(["0,2\n", "1,3\n", "0,2\n", "1,3\n"]):
        write(tmp_path / f"cpu{thread}/topology/thread_siblings_list", siblings)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert len(cores.allowed_cores(tmp_path)) == 2


def test_every_hardware_thread_counts_when_the_topology_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert len(cores.allowed_cores(tmp_path)) == 3


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        pytest.param("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5, id="inside a container"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, math.inf, id="no limit"),
        pytest.param(
            "0::/a/b\n",
            {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"},
            2,
            id="the parent's limit",
        ),
        pytest.param(
            "5:cpu,cpuacct:/of/the/host\n4:memory:/x\n",
            {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            0.5,
            id="version 1",
        ),
        pytest.param(
            "5:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            math.inf,
            id="version 1, no limit",
        ),
        pytest.param("1:memory:/\n", {}, math.inf, id="cpu is not controlled"),
    ],
)
def test_core_quota_is_read_from_control_groups(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float
) -> None:
    write(tmp_path / "cgroup", membership)
    for name, text in files.items():
        write(tmp_path / "root" / name, text)
    assert cores.granted_cores(tmp_path / "cgroup", tmp_path / "root")[0] == quota


def test_granting_group_is_the_same_for_all_its_processes(
    tmp_path: Path,
) -> None:
    for name, text in {"a/cpu.max": "200000 100000", "b/cpu.max": "200000 100000"}.items():
        write(tmp_path / "root" / name, text)
    groups = {}
    for path in ("/a", "/a/inner", "/b"):
        (tmp_path / "root" / path.lstrip("/")).mkdir(exist_ok=True)
        write(tmp_path / "cgroup", f"0::{path}\n")
        groups[path] = cores.granted_cores(tmp_path / "cgroup", tmp_path / "root")
    assert groups["/a"] == groups["/a/inner"]
    assert groups["/a"] != groups["/b"]
    assert groups["/a"][0] == groups["/b"][0] == 2


def test_core_quota_is_infinite_without_control_groups(tmp_path: Path) -> None:
    assert cores.granted_cores(tmp_path / "cgroup", tmp_path) == (math.inf, "")


@pytest.mark.parametrize(("quota", "usable"), [(math.inf, 4), (8.0, 4), (1.5, 2), (0.1, 1)])
def test_usable_cores_is_the_lower_of_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float, usable: int
) -> None:
    monkeypatch.setattr(cores, "allowed_cores", lambda: frozenset("abcd"))
    monkeypatch.setattr(cores, "granted_cores", lambda: (quota, "a"))
    assert cores.usable_cores() == usable


def test_processes_of_a_host_share_its_cores_and_their_groups_quotas() -> None:
    def shared(*processes: tuple[str, float, str]) -> float:
        return cores.shared_cores(processes)

    free = ("01", math.inf, "")
    assert shared(free, free) == 2
    assert shared(("0", math.inf, ""), ("1", math.inf, ""), free) == 2
    a_container_of_two = ("0123", 2.0, "a")
    assert shared(a_container_of_two, a_container_of_two) == 2
    assert shared(a_container_of_two, ("0123", 1.5, "b")) == 3.5
    assert shared(a_container_of_two, ("45", math.inf, "")) == 6
