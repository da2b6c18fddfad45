"""A simulation logs nothing about the machine it runs on, and no message twice."""

from __future__ import annotations

import logging

import pytest

from gtopk.cli.simulate.ranks import filtered_logs
from gtopk.telemetry import stragglers


def test_messages_on_this_machine_and_repetitions_are_filtered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("gtopk")

    def log_messages() -> list[str]:
        caplog.clear()
        for rank in (1, 1, 2):
            logger.warning("rank %d has few entries", rank)
        stragglers._log.handle(
            stragglers._log.makeRecord("gtopk", 30, stragglers.__file__, 1, "slow", (), None)
        )
        return caplog.messages

    with filtered_logs():
        assert log_messages() == ["rank 1 has few entries", "rank 2 has few entries"]
    assert len(log_messages()) == 4
