"""Horovod's environment variables configure the engine."""

from __future__ import annotations

import math

import pytest

from gtopk.runtime.coordinator.execution import Settings, settings_from
from tests.started import under


def test_empty_environment_gives_the_default_settings():
    assert under({}, settings_from) == Settings()


def test_environment_variables_have_horovods_units():
    found = under(
        {
            "HOROVOD_CYCLE_TIME": "2.5",
            "HOROVOD_CACHE_CAPACITY": "7",
            "HOROVOD_FUSION_THRESHOLD": "1000",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90",
        },
        settings_from,
    )
    assert found == Settings(0.0025, 7, 1000, 30.0, 90.0)


def test_disabled_stall_check_has_no_limits():
    found = under(
        {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"},
        settings_from,
    )
    assert found.stall_warning_seconds == found.stall_shutdown_seconds == math.inf


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_invalid_cycle_time_is_refused(text):
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME must be a number of milliseconds, at"):
        under({"HOROVOD_CYCLE_TIME": text}, settings_from)


def test_idle_interval_is_well_below_every_timeout():
    assert Settings().limit_idle(600.0).idle_seconds == 10.0
    assert Settings().limit_idle(3.0).idle_seconds < 1.0
    assert Settings(stall_warning_seconds=2.0).limit_idle(600.0).idle_seconds < 1.0
    assert Settings(stall_shutdown_seconds=2.0).limit_idle(600.0).idle_seconds < 1.0
