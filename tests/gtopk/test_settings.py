"""Every variable has a type, a default and an error for wrong values; one file reads all."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from collectives import environment
from gtopk import settings
from gtopk.runtime.liveness import heartbeat
from gtopk.runtime.world import world
from gtopk.settings import SECTIONS, Setting
from tests.started import under

ROOT = Path(__file__).parents[2]
ALL = [setting for section in SECTIONS.values() for setting in section]
OF_COLLECTIVES = {
    "GTOPK_KERNELS": environment.kernels,
    "GTOPK_THREADS": environment.threads,
    "GTOPK_CALIBRATION": environment.calibration,
}


LINKS = (
    "a rate above 0 and, after a comma, an optional latency, such as 100mbit, 1gbit or "
    "100mbit,0.4ms"
)


@pytest.mark.parametrize(
    ("text", "bits_per_second", "latency_seconds"),
    [
        ("100mbit", 1e8, 0.0),
        ("1Gbit/s", 1e9, 0.0),
        ("2.5gbit, 50us", 2.5e9, 5e-5),
        (" 100 Mbit/s, 0.4 ms", 1e8, 4e-4),
        ("64kbit,1s", 64e3, 1.0),
    ],
)
def test_link_is_parsed_as_rate_and_optional_latency(
    text: str, bits_per_second: float, latency_seconds: float
) -> None:
    link = under({"GTOPK_LINK": text}, settings.LINK.read)
    assert link == pytest.approx((bits_per_second, latency_seconds))


@pytest.mark.parametrize("environ", [{}, None], ids=["unset", "empty"])
@pytest.mark.parametrize("setting", ALL, ids=lambda setting: setting.name)
def test_empty_variable_equals_an_unset_one(
    setting: Setting[object], environ: dict[str, str] | None
) -> None:
    assert (
        under({setting.name: ""} if environ is None else environ, setting.read) == setting.default
    )


@pytest.mark.parametrize("text", ["2.5", "25e-1", " 2.5 "])
def test_number_is_parsed(text: str) -> None:
    assert under({"GTOPK_TIMEOUT": text}, settings.TIMEOUT.read) == 2.5


@pytest.mark.parametrize(
    ("setting", "text", "must_be"),
    [
        *(
            (settings.TIMEOUT, text, "a number of seconds above 0")
            for text in ("0", "-1", "soon", "nan", "inf", "1e999")
        ),
        *(
            (settings.HEARTBEAT_TIMEOUT, text, "a number of seconds, at least 0")
            for text in ("-1", "soon", "nan", "inf")
        ),
        *(
            (settings.ELASTIC_KEEP, text, "a whole number of commits, at least 1")
            for text in ("0", "-3", "2.0", "2e0", "²", "soon")
        ),
        (settings.ELASTIC_KEEP, "1" * 16, "a whole number of commits, of at most 15 digits"),
        # Beyond, the system's waits and the messages' integers overflow.
        (settings.START_TIMEOUT, "1e10", "a number of seconds, at most 1e+09"),
        (settings.CYCLE_TIME, "1e10", "a number of milliseconds, at most 1e+09"),
        (settings.FUSION_THRESHOLD, "1e20", "a number of bytes, at most 1e+15"),
        (settings.CHECK_MESSAGES, "yes", "0 or 1"),
        *(
            (settings.LINK, text, LINKS)
            for text in ("fast", "100", "0mbit", "1.2.3mbit", "100mbit,4", "100mbit,", "mbit")
        ),
        (settings.LOG, "loud", "one of debug, info, warning, error, off"),
        (settings.ADVICE, "flase", "one of 1, on, true, yes, 0, off, false, no"),
        (settings.ALLOW_PICKLE, "yes", "0 or 1"),
        (settings.THREADS, "0", "a whole number of threads, at least 1"),
    ],
)
def test_invalid_value_raises(setting: Setting[object], text: str, must_be: str) -> None:
    message = f"{setting.name} must be {must_be}, got {text!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        under({setting.name: text}, setting.read)


def test_heartbeat_timeout_may_be_zero() -> None:
    assert under({"GTOPK_HEARTBEAT_TIMEOUT": "0"}, settings.HEARTBEAT_TIMEOUT.read) == 0.0


@pytest.mark.parametrize("text", ["off", "OFF", "0", "false", "no"])
def test_switch_is_off_for_each_of_its_words(text: str) -> None:
    assert under({"GTOPK_ADVICE": text}, settings.ADVICE.read) is False
    assert (
        under({"GTOPK_ADVICE": "on"}, settings.ADVICE.read)
        is under({}, settings.ADVICE.read)
        is True
    )


@pytest.mark.parametrize("setting", [settings.STALL_CHECK_DISABLE, settings.DYNAMIC_PROCESS_SETS])
def test_switch_of_horovod_is_on_for_any_number_above_zero(setting: Setting[bool]) -> None:
    values = [under({setting.name: text}, setting.read) for text in ("2", "01", "00")]
    assert values == [True, True, False]


# Paths and names, of which any text may be right; and what gtopk tells its own processes.
ANY_TEXT = {
    *("GTOPK_CALIBRATION", "GTOPK_SIMGRID_PYTHON", "GTOPK_WANDB", "GTOPK_MLFLOW"),
    *("GTOPK_RUN", "GTOPK_FAILURE_DIR", "GTOPK_TENSORBOARD", "GTOPK_TIMELINE"),
    *("GTOPK_ELASTIC_DIR", "HOROVOD_TIMELINE"),
    *(setting.name for setting in SECTIONS[settings.CHILDREN.title]),
}
# Checked where their allowed texts are known.
CHECKED_ELSEWHERE = {
    "GTOPK_KERNELS": environment.kernels,
    "GTOPK_INTERFACE": lambda: heartbeat.own_address(one_host=True),
}


@pytest.mark.parametrize("text", ["no sense", "1,5", "9" * 5000])
@pytest.mark.parametrize("name", sorted({setting.name for setting in ALL} - ANY_TEXT))
def test_nonsense_raises_one_error_with_variable_rule_and_value(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"^{name} must (be|name) .*, got '{text}'"):
        CHECKED_ELSEWHERE.get(name, world.init)()
    assert not world.is_initialized()


def test_take_removes_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GTOPK_RUN_SECRET", "ab")
    assert [settings.RUN_SECRET.take(), settings.RUN_SECRET.take()] == ["ab", ""]


def test_settings_have_unique_names() -> None:
    assert len({setting.name for setting in ALL}) == len(ALL)


def test_settings_include_the_variables_that_collectives_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {*OF_COLLECTIVES} <= {setting.name for setting in ALL}
    for name, read in OF_COLLECTIVES.items():
        monkeypatch.delenv(name, raising=False)
        unset = read()
        monkeypatch.setenv(name, "3" if name == "GTOPK_THREADS" else "reference")
        assert read() != unset


def test_only_the_readers_contain_variable_names() -> None:
    known = {setting.name for setting in ALL}
    readers = {"gtopk/settings.py", "collectives/environment.py"}
    found = [
        (path.relative_to(ROOT).as_posix(), node.value)
        for package in ("collectives", "gtopk")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in known
    ]
    assert {path for path, _ in found} == readers
    assert {name for path, name in found if path != "gtopk/settings.py"} == {*OF_COLLECTIVES}
