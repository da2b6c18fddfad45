"""The logger names its rank, and yields to the script's own handlers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from collectives.transports import local_world
from gtopk import load_latest, save_checkpoint
from gtopk.runtime import logs
from gtopk.runtime.world import world

LOG = logging.getLogger("gtopk")


@contextmanager
def nobody_else_listening() -> Iterator[None]:
    """Temporarily remove pytest's handlers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        patch.setattr(LOG, "handlers", [])
        patch.setattr(LOG, "level", logging.NOTSET)
        yield
        logs.remove_handler()


@pytest.mark.parametrize(
    ("rank", "asked", "levels"),
    [
        (0, "", ["info", "warning", "of all"]),
        (3, "", ["warning"]),
        (3, "info", ["info", "warning", "of all"]),
        (0, "error", []),
        (0, "off", []),
    ],
)
def test_rank_0_says_more_than_the_others(
    capsys: pytest.CaptureFixture[str], rank: int, asked: str, levels: list[str]
) -> None:
    with nobody_else_listening():
        logs.install_handler(rank, {"GTOPK_LOG": asked})
        LOG.info("info %d", 1)
        LOG.warning("rank %d: warning %d", rank, 2)  # some messages name the rank themselves
        LOG.warning("of all", extra=logs.EVERYWHERE)
        logs.remove_handler()
        LOG.info("after shutdown")
    said = {
        "info": f"gtopk: rank {rank}: info 1",
        "warning": f"gtopk: rank {rank}: warning 2",
        "of all": f"gtopk: rank {rank}: of all",
    }
    assert capsys.readouterr().err.splitlines() == [said[level] for level in levels]


def test_a_script_that_logs_hears_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []

    class Own(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    with nobody_else_listening():
        logs.install_handler(0, {})
        logging.getLogger().addHandler(Own())
        LOG.warning("once")
    assert heard == ["once"]
    assert capsys.readouterr().err == ""


def test_another_rank_takes_the_place_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    with nobody_else_listening():
        logs.install_handler(0, {})
        logs.install_handler(1, {})  # after an elastic recovery
        LOG.warning("once")
    assert capsys.readouterr().err == "gtopk: rank 1: once\n"


def test_a_line_about_another_rank_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with nobody_else_listening():
        logs.install_handler(1, {})
        LOG.warning("rank 10 left")
        LOG.warning("rank 1 stays")
    said = capsys.readouterr().err
    assert said == "gtopk: rank 1: rank 10 left\ngtopk: rank 1 stays\n"


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError], ids=["unread", "closed"])
def test_a_message_that_cannot_be_printed_is_no_error(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    tried: list[str] = []

    def write(text: str) -> None:
        tried.append(text)
        raise error

    with nobody_else_listening():
        logs.install_handler(0, {})
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
        LOG.info("news")
        monkeypatch.undo()
    assert tried == ["gtopk: rank 0: news\n"]


def test_another_level_is_refused() -> None:
    with pytest.raises(ValueError, match="GTOPK_LOG must be one of debug, info"):
        logs.install_handler(0, {"GTOPK_LOG": "loud"})


@pytest.mark.parametrize(
    ("asked", "heard"),
    [("", "news bad"), ("debug", "news bad"), ("warning", "bad"), ("error", ""), ("off", "")],
)
def test_what_is_said_before_a_world_begins_is_as_loud_as_was_asked_for(
    capsys: pytest.CaptureFixture[str], asked: str, heard: str
) -> None:
    logs.print_line("news", environ={"GTOPK_LOG": asked})
    logs.print_line("bad", logging.WARNING, {"GTOPK_LOG": asked})
    assert capsys.readouterr().err.replace("gtopk: ", "").split() == heard.split()


def test_a_run_that_is_to_be_silent_is_silent_also_where_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GTOPK_LOG", "off")
    model = torch.nn.Linear(2, 2)
    with world.entered(local_world(1)[0]):
        for step in (1, 2):
            save_checkpoint(tmp_path, model, None, step=step)
    newest = max(tmp_path.glob("checkpoint-*"))
    next(newest.glob("all-of-*.json")).unlink()
    with world.entered(local_world(1)[0]):
        found = load_latest(tmp_path, model)
    assert found is not None
    assert found.step == 1
    assert capsys.readouterr().err == ""
