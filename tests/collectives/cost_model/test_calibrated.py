"""A calibration is saved, loaded, and discarded when it is no longer valid."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from collectives import run_ranks
from collectives.cost import Link
from collectives.cost_model import CodingRate, Format, Network, Rates, cache, calibrate
from collectives.cost_model.calibration import Calibration
from collectives.transports import local_world

FACTS = {"hosts": "2 x a", "kernels": "fast"}
KEPT = Calibration(
    Network(2, Link(1e-5, 1e-9), 2, Link(1e-6, 1e-10), None, 3e-5, 1 << 24),
    Rates(1e-9, 2e-8, {Format(): CodingRate(1e-9, 2e-9)}),
    "measured once",
)


@pytest.fixture(autouse=True)
def cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GTOPK_CALIBRATION", raising=False)
    return tmp_path


def on_ranks(size: int, **options) -> list[Calibration]:
    return run_ranks(local_world(size, 30), lambda t: calibrate(t, **options))


def test_saved_calibration_is_loaded(tmp_path):
    path = tmp_path / "deep" / "kept.json"
    assert cache.save(path, FACTS, KEPT)
    assert cache.load(path, FACTS, 2) == KEPT
    assert [entry.name for entry in path.parent.iterdir()] == ["kept.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace('"saved": ', '"saved": -'),
        lambda text: text.replace("1e-09", "NaN"),
        lambda text: text.replace("1e-09", "-1"),
        lambda text: text.replace("1e-09", '"x"'),
        lambda text: text.replace('"ranks"', '"rank"'),
        lambda text: text.replace('"rates"', '"rate"'),
        lambda text: re.sub(r'"swap_seconds": 0.0,\s*', "", text),
        lambda text: re.sub(r',\s*"copy_seconds": 0.0', "", text),  # as it was written once
        lambda text: re.sub(r',\s*"agreement_seconds": 3e-05', "", text),  # likewise
        lambda text: text.replace("3e-05", "-1"),
        lambda text: text.replace("3e-05", "NaN"),
        lambda text: text.replace("16777216", "NaN"),
        lambda text: text.replace("16777216", "Infinity"),
        lambda text: text.replace("16777216", "1.5"),
        lambda text: text.replace("16777216", "-1"),
        lambda text: text.replace("16777216", '"7"'),
        lambda text: re.sub(r',\s*"native_bytes": 16777216', "", text),  # as it was written once
        lambda text: text.replace('"native_bytes":', '"segment_bytes": 8388608, "native_bytes":'),
        lambda text: text.replace("3e-05", "1" + 400 * "0"),
        lambda text: text.replace('"ranks": 2', '"ranks": 0'),
        lambda text: text.replace('"ranks": 2', '"ranks": 2.0'),
        lambda text: text.replace('"ranks": 2', '"ranks": 3'),
        lambda text: text.replace('"ranks_per_node": 2', '"ranks_per_node": 2.5'),
        lambda text: text.replace('"ranks_per_node": 2', '"ranks_per_node": true'),
        lambda text: text.replace('"ranks_per_core": 1.0', '"ranks_per_core": 0.5'),
        lambda text: text.replace('"ranks_per_core": 1.0', '"ranks_per_core": Infinity'),
        lambda text: text.replace('"ranks_per_core": 1.0', '"ranks_per_core": "2"'),
        lambda text: text.replace('"ranks_per_core": 1.0', '"ranks_per_core": true'),
        lambda text: 100_000 * "[",
        lambda text: re.sub(r'"between": \[[^\]]*\]', '"between": null', text),
        lambda text: re.sub(r'"between": \[[^\]]*\]', '"between": [0.001, 0, 1000]', text),
        lambda text: "\udcff",
    ],
)
def test_damaged_cache_file_is_ignored(tmp_path, damage):
    path = tmp_path / "kept.json"
    cache.save(path, FACTS, KEPT)
    text = path.read_text()
    damaged = damage(text)
    assert damaged != text
    path.write_bytes(damaged.encode(errors="surrogateescape"))
    assert cache.load(path, FACTS, 2) is None


def test_cache_file_of_other_facts_or_too_old_is_ignored(tmp_path):
    path = tmp_path / "kept.json"
    cache.save(path, FACTS, KEPT)
    assert cache.load(path, {**FACTS, "hosts": "2 x b"}, 2) is None
    record = json.loads(path.read_text())
    for saved in (time.time() - cache.OLDEST_SECONDS - 1, time.time() + 1000):
        path.write_text(json.dumps({**record, "saved": saved}))
        assert cache.load(path, FACTS, 2) is None
    assert cache.load(tmp_path / "nothing.json", FACTS, 2) is None


def test_save_returns_false_when_the_folder_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert not cache.save(tmp_path / "file" / "kept.json", FACTS, KEPT)


def test_save_keeps_the_newest_cache_files_and_removes_no_other_file(tmp_path):
    folder = tmp_path / "gtopk"
    folder.mkdir()
    others = {folder / "calibration-mine.json", folder / "calibration.txt"}
    for path in others:
        path.write_text("")
        os.utime(path, (1, 1))
    for age in range(1, 2 * cache.MOST_FILES):
        killed = ".4711" if age % 2 else ""  # killed while writing
        path = folder / f"calibration-{age:016x}.json{killed}"
        path.write_text("")
        os.utime(path, (time.time() - age, time.time() - age))
    path = cache.cache_path(FACTS)
    assert cache.save(path, FACTS, KEPT)
    kept = {*folder.iterdir()} - others
    assert len(kept) == cache.MOST_FILES
    assert {int(each.name[12:28], 16) for each in kept - {path}} == {*range(1, cache.MOST_FILES)}
    assert cache.load(path, FACTS, 2) == KEPT
    assert others < {*folder.iterdir()}
    mine = tmp_path / "gtopk" / "mine.json"
    (folder / f"calibration-{0:016x}.json").write_text("")
    assert cache.save(mine, FACTS, KEPT)
    assert len({*folder.iterdir()} - others) == cache.MOST_FILES + 2


@pytest.mark.parametrize("place", [".", "/"])
def test_calibration_is_not_cached_when_its_path_is_a_folder(monkeypatch, place):
    monkeypatch.setenv("GTOPK_CALIBRATION", place)
    assert all("cached in" not in found.origin for found in on_ranks(2))


def test_failed_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    folder = tmp_path / "in the way"
    folder.mkdir()
    assert not cache.save(folder, FACTS, KEPT)
    assert [*tmp_path.iterdir()] == [folder]

    def interrupted(beside: Path, path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.save(tmp_path / "kept.json", FACTS, KEPT)
    assert [*tmp_path.iterdir()] == [folder]


def test_second_run_loads_the_first_runs_calibration():
    first = on_ranks(3)
    second = on_ranks(3)
    assert first == [first[0]] * 3
    assert second == [second[0]] * 3
    assert second[0].network == first[0].network
    assert second[0].rates == first[0].rates
    assert "cached in" in second[0].origin
    other = on_ranks(2)  # a new number of ranks
    assert "cached in" not in other[0].origin
    assert "cached in" not in on_ranks(3, facts={"gtopk": "another version"})[0].origin


def test_cached_calibration_depends_on_which_ranks_share_a_host(monkeypatch):
    host = threading.local()
    monkeypatch.setattr(cache.socket, "gethostname", lambda: host.name)
    four = replace(KEPT, network=KEPT.network._replace(ranks=4))
    monkeypatch.setattr(cache, "measure", lambda *_: four)
    monkeypatch.setattr(cache, "links_unchanged", lambda *_: True)

    def origin(hosts: str) -> str:
        def calibrate_on_host(transport):
            host.name = hosts[transport.rank]
            return calibrate(transport).origin

        return run_ranks(local_world(4, 30), calibrate_on_host)[0]

    assert "cached in" not in origin("aabb")
    assert "cached in" not in origin("abab")
    assert "cached in" in origin("aabb")


def test_cached_calibration_depends_on_model_version_and_native_allreduce(monkeypatch):
    """For example, a view of all ranks has an allreduce made of messages."""
    monkeypatch.setattr(cache, "measure", lambda *_: KEPT)
    monkeypatch.setattr(cache, "links_unchanged", lambda *_: True)

    def origin(native_bytes: int = sys.maxsize) -> str:
        world = local_world(2, 30)
        for transport in world:
            transport.native_bytes = lambda: native_bytes
        return run_ranks(world, calibrate)[0].origin

    assert "cached in" not in origin()
    assert "cached in" in origin()
    assert "cached in" not in origin(native_bytes=0)
    assert "cached in" not in origin(native_bytes=1 << 24)
    assert "cached in" in origin(native_bytes=0)
    monkeypatch.setattr(cache, "MODEL", cache.MODEL + 1)
    assert "cached in" not in origin()


def test_cached_calibration_depends_on_ranks_per_core(monkeypatch):
    """For example ranks bound to a core each, or containers with another quota."""
    monkeypatch.setattr(cache, "measure", lambda *_: KEPT)
    monkeypatch.setattr(cache, "links_unchanged", lambda *_: True)

    def origin(per_core: float) -> str:
        monkeypatch.setattr(cache, "ranks_per_core", lambda transport: per_core)
        return on_ranks(2)[0].origin

    assert "cached in" not in origin(1.0)
    assert "cached in" not in origin(2.0)
    assert "cached in" in origin(1.0)


def test_calibration_setting_fresh_measures_again_and_off_measures_nothing(monkeypatch, cache_home):
    monkeypatch.setenv("GTOPK_CALIBRATION", "off")
    assert "assumed" in on_ranks(2)[0].origin
    assert not list(cache_home.iterdir())
    monkeypatch.setenv("GTOPK_CALIBRATION", "fresh")
    assert "cached in" not in on_ranks(2)[0].origin
    assert "cached in" not in on_ranks(2)[0].origin
    monkeypatch.delenv("GTOPK_CALIBRATION")
    assert "cached in" in on_ranks(2)[0].origin


def test_calibration_setting_ignores_case(monkeypatch, cache_home):
    monkeypatch.chdir(cache_home)
    monkeypatch.setenv("GTOPK_CALIBRATION", "OFF")
    assert "assumed" in on_ranks(2)[0].origin
    monkeypatch.setenv("GTOPK_CALIBRATION", "Fresh")
    on_ranks(2)
    assert "cached in" not in on_ranks(2)[0].origin
    assert [entry.name for entry in cache_home.iterdir()] == ["gtopk"]


def test_calibration_is_not_cached_without_a_home_folder(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cache.Path, "home", no_home)
    for _ in range(2):
        assert "cached in" not in on_ranks(2)[0].origin
    monkeypatch.setenv("GTOPK_CALIBRATION", "off")
    assert "assumed" in on_ranks(2)[0].origin


def test_calibration_setting_may_name_the_cache_file(monkeypatch, tmp_path):
    path = tmp_path / "mine.json"
    monkeypatch.setenv("GTOPK_CALIBRATION", str(path))
    on_ranks(2)
    assert path.exists()
    assert str(path) in on_ranks(2)[0].origin
    path.write_text("{")
    assert "cached in" not in on_ranks(2)[0].origin
    assert str(path) in on_ranks(2)[0].origin
