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
from tests.started import under

LOG = logging.getLogger("gtopk")


@contextmanager
def without_other_handlers() -> Iterator[None]:
    """Temporarily remove pytest's handlers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        patch.setattr(LOG, "handlers", [])
        patch.setattr(LOG, "level", logging.NOTSET)
        yield
        logs.remove_handler()


@pytest.mark.parametrize(
    ("rank", "setting", "levels"),
    [
        (0, "", ["info", "warning", "of all"]),
        (3, "", ["warning"]),
        (3, "info", ["info", "warning", "of all"]),
        (0, "error", []),
        (0, "off", []),
    ],
)
def test_log_level_depends_on_rank_and_setting(
    capsys: pytest.CaptureFixture[str], rank: int, setting: str, levels: list[str]
) -> None:
    with without_other_handlers():
        under({"GTOPK_LOG": setting}, logs.install_handler, rank)
        LOG.info("info %d", 1)
        LOG.warning("rank %d: warning %d", rank, 2)  # some messages name the rank themselves
        LOG.warning("of all", extra=logs.EVERYWHERE)
        logs.remove_handler()
        LOG.info("after shutdown")
    lines = {
        "info": f"gtopk: rank {rank}: info 1",
        "warning": f"gtopk: rank {rank}: warning 2",
        "of all": f"gtopk: rank {rank}: of all",
    }
    assert capsys.readouterr().err.splitlines() == [lines[level] for level in levels]


def test_script_with_its_own_handler_gets_each_line_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    received: list[str] = []

    class Own(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            received.append(record.getMessage())

    with without_other_handlers():
        under({}, logs.install_handler, 0)
        logging.getLogger().addHandler(Own())
        LOG.warning("once")
    assert received == ["once"]
    assert capsys.readouterr().err == ""


def test_second_handler_replaces_the_first_ones_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with without_other_handlers():
        under({}, logs.install_handler, 0)
        under({}, logs.install_handler, 1)  # after an elastic recovery
        LOG.warning("once")
    assert capsys.readouterr().err == "gtopk: rank 1: once\n"


def test_line_gets_the_rank_as_prefix_unless_it_begins_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with without_other_handlers():
        under({}, logs.install_handler, 1)
        LOG.warning("rank 10 left")
        LOG.warning("rank 1 stays")
    output = capsys.readouterr().err
    assert output == "gtopk: rank 1: rank 10 left\ngtopk: rank 1 stays\n"


@pytest.mark.parametrize(
    "error", [BrokenPipeError, ValueError], ids=["broken pipe", "closed stream"]
)
def test_message_that_cannot_be_printed_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    attempts: list[str] = []

    def write(text: str) -> None:
        attempts.append(text)
        raise error

    with without_other_handlers():
        under({}, logs.install_handler, 0)
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
        LOG.info("news")
        monkeypatch.undo()
    assert attempts == ["gtopk: rank 0: news\n"]


def test_unknown_log_level_is_refused() -> None:
    with pytest.raises(ValueError, match="GTOPK_LOG must be one of debug, info"):
        under({"GTOPK_LOG": "loud"}, logs.install_handler, 0)


@pytest.mark.parametrize(
    ("setting", "printed"),
    [("", "news bad"), ("debug", "news bad"), ("warning", "bad"), ("error", ""), ("off", "")],
)
def test_print_line_obeys_the_log_setting(
    capsys: pytest.CaptureFixture[str], setting: str, printed: str
) -> None:
    under({"GTOPK_LOG": setting}, logs.print_line, "news")
    under({"GTOPK_LOG": setting}, logs.print_line, "bad", logging.WARNING)
    assert capsys.readouterr().err.replace("gtopk: ", "").split() == printed.split()


def test_log_off_silences_the_resume_from_an_earlier_checkpoint(
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
