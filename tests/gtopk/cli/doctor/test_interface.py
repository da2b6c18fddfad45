"""The doctor reports the network between hosts, and how to choose another."""

from __future__ import annotations

import pytest

from gtopk.cli.doctor.basics import State
from gtopk.cli.doctor.isolation import check_interface, judge_interface
from gtopk.runtime.liveness.heartbeat import Choice, address_of, choose_address, interfaces
from tests.started import under

ROUTE = "default route"
LOOPBACK = {"lo": "127.0.0.1"}
ONE = {**LOOPBACK, "eth0": "10.0.0.5"}
TWO = {**ONE, "ib0": "10.1.0.5"}
BESIDE_DOCKER = {**ONE, "docker0": "172.17.0.1"}
EVERYWHERE = (
    "export GTOPK_INTERFACE=eth0 GLOO_SOCKET_IFNAME=eth0 OMPI_MCA_btl_tcp_if_include=eth0 "
    "NCCL_SOCKET_IFNAME=eth0"
)


@pytest.mark.parametrize(
    ("found", "chosen", "resolved", "environ", "state", "parts"),
    [
        (ONE, "eth0", "10.0.0.5", {}, State.OK, ["listens on eth0 (10.0.0.5), by default route"]),
        (BESIDE_DOCKER, "eth0", "10.0.0.5", {}, State.OK, ["also docker0 (172.17.0.1)"]),
        (TWO, "eth0", "10.0.0.5", {}, State.WARN, ["also ib0", "no setting names one", EVERYWHERE]),
        (TWO, "ib0", "10.0.0.5", {"GTOPK_INTERFACE": "ib0"}, State.OK, ["listens on ib0"]),
        (
            *(ONE, "eth0", "127.0.1.1", {}, State.WARN),
            ["this host's name, 'node1', resolves to 127.0.1.1, and gloo uses", EVERYWHERE],
        ),
        (ONE, "eth0", "127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, State.OK, ["listens on eth0"]),
        (ONE, "eth0", "", {}, State.WARN, ["'node1', does not resolve"]),
        (
            *(BESIDE_DOCKER, "docker0", "10.0.0.5", {}, State.WARN),
            ["docker0 leads to containers of this host", EVERYWHERE],
        ),
        (LOOPBACK, "", "127.0.0.1", {}, State.WARN, ["only the loopback has an address"]),
        (ONE, "lo", "10.0.0.5", {}, State.WARN, ["no other host reaches it", "unset default"]),
    ],
)
def test_finding_names_the_interface_used_and_the_settings_needed(
    found, chosen, resolved, environ, state, parts
) -> None:
    choice = Choice(found.get(chosen, ""), ROUTE)
    finding = under(environ, judge_interface, choice, found, "node1", resolved)
    assert finding.state is state
    text = f"{finding.detail} -> {finding.advice}"
    assert not [part for part in parts if part not in text], text
    assert bool(finding.advice) == (state is not State.OK)


def test_finding_has_the_address_that_the_heartbeat_uses(monkeypatch) -> None:
    monkeypatch.delenv("GTOPK_INTERFACE", raising=False)
    assert interfaces()["lo"] == address_of("lo")
    if address := under({}, choose_address, False).address:
        assert address in check_interface().detail


def test_chosen_address_comes_with_its_reason() -> None:
    assert under({"GTOPK_INTERFACE": "lo"}, choose_address, True) == (
        "127.0.0.1",
        "GTOPK_INTERFACE",
    )
    assert under({"NCCL_SOCKET_IFNAME": "lo"}, choose_address, False) == (
        "127.0.0.1",
        "NCCL_SOCKET_IFNAME",
    )
    assert under({}, choose_address, True) == ("127.0.0.1", "all ranks on one host")
