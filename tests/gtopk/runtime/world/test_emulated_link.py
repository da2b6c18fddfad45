"""GTOPK_LINK: on all ranks or none, on one host, and only if messages can be paced."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest

from collectives.cost import Link
from collectives.transports import local_world, run_ranks
from gtopk.runtime.world import world
from gtopk.runtime.world.membership import configured_choice, emulate_given, emulate_on
from gtopk.telemetry.run_record import balance_of
from tests.gtopk.made_runs import report
from tests.started import under

SIZE = 3
LINK = "1gbit,0.1ms"


def test_link_variable_paces_the_world_and_rank_0_logs_it(monkeypatch, caplog):
    monkeypatch.setenv("GTOPK_LINK", LINK)

    def program(transport):
        with world.entered(transport):
            return transport.link, transport.channel(5).link

    with caplog.at_level(logging.INFO, "gtopk"):
        found = run_ranks(local_world(SIZE), program)
    assert found == [(Link.of(1e9, 1e-4),) * 2] * SIZE
    announcements = [
        text for text in caplog.messages if "emulated link of 1000 Mbit/s, 0.1 ms" in text
    ]
    assert len(announcements) == 1
    assert "torch.distributed are not paced" in announcements[0]


def test_verdict_at_the_end_of_a_run_names_the_emulated_link(monkeypatch, caplog):
    monkeypatch.setenv("GTOPK_LINK", LINK)

    def program(transport):
        with world.entered(transport) as here:
            balance_of(here).note(report(dense_seconds=1.0))
            world.shutdown()

    with caplog.at_level(logging.INFO, "gtopk"):
        run_ranks(local_world(SIZE), program)
    (verdict,) = [text for text in caplog.messages if "compare with a dense run" in text]
    assert verdict.startswith("over an emulated link of 1000 Mbit/s, 0.1 ms, compression saved")


def test_messages_are_not_paced_without_the_link_variable(monkeypatch):
    monkeypatch.delenv("GTOPK_LINK", raising=False)

    def program(transport):
        emulate_on(transport)
        return transport.link

    assert run_ranks(local_world(SIZE), program) == [None] * SIZE


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ([LINK, LINK, ""], "must be the same on all ranks, got '1gbit,0.1ms' on rank 0 and ''"),
        (["fast"] * 3, "GTOPK_LINK must be a rate above 0 .* got 'fast'"),
    ],
)
def test_differing_or_invalid_link_raises_on_all_ranks(monkeypatch, texts, error):
    monkeypatch.setenv("GTOPK_LINK", texts[0])

    def program(transport):
        with pytest.raises(ValueError, match=error):
            emulate_given(transport, texts)
        return transport.link

    assert run_ranks(local_world(SIZE), program) == [None] * SIZE


def test_link_variable_is_refused_on_several_hosts(monkeypatch):
    monkeypatch.setenv("GTOPK_LINK", LINK)

    def program(transport):
        with pytest.raises(ValueError, match=f"GTOPK_LINK={re.escape(LINK)}: a link is emulated"):
            emulate_on(transport)

    run_ranks(local_world(4, node_size=2), program)


def test_link_variable_refuses_nccl_and_prevents_its_automatic_choice():
    nccl = SimpleNamespace(name="nccl", size=2, gather_object=lambda text: [text] * 2)
    with pytest.raises(ValueError, match="GTOPK_TRANSPORT=staged"):
        under({"GTOPK_LINK": LINK}, emulate_on, nccl)
    assert under({}, configured_choice, local_world(2)[0], [1, 1]) is None
    choice = under({"GTOPK_LINK": LINK}, configured_choice, local_world(2)[0], [1, 1])
    assert "GTOPK_LINK" in choice.reason
