"""The doctor warns if the internet may reach one of gtopk's own ports."""

from __future__ import annotations

import socket

import pytest

from gtopk.cli.doctor import isolation
from gtopk.cli.doctor.basics import State
from gtopk.cli.doctor.isolation import check_ports, judge_ports
from gtopk.runtime.liveness.heartbeat import Choice
from tests.started import under

PUBLIC, PUBLIC_IPV6 = "93.184.216.34", "2606:2800:220:1::34"
LOOPBACK = ("lo", "127.0.0.1")
INSIDE = [LOOPBACK, ("eth0", "10.0.0.5"), ("eth0", "fe80::1")]
RENTED = [LOOPBACK, ("eth0", PUBLIC), ("eth0", PUBLIC_IPV6)]
WITH_VPN = [*RENTED, ("docker0", "172.17.0.1"), ("wg0", "10.8.0.2")]
VPN = (
    "export GTOPK_INTERFACE=wg0 GLOO_SOCKET_IFNAME=wg0 OMPI_MCA_btl_tcp_if_include=wg0 "
    "NCCL_SOCKET_IFNAME=wg0"
)
FIREWALL = "let the firewall admit only the job's hosts"
BY_ROUTE = Choice(PUBLIC, "default route")


def finding_for(
    choice: Choice, own: list[tuple[str, str]], **environ: str
) -> tuple[State, str, str]:
    finding = judge_ports(under(environ, isolation.ports, choice, own), own)
    assert finding.name == "ports"
    return finding.state, finding.detail, finding.advice


def test_private_addresses_are_ok() -> None:
    inside = Choice("10.0.0.5", "default route")
    state, detail, advice = finding_for(inside, INSIDE, GTOPK_PROMETHEUS="9400")
    assert state is State.OK
    assert "heartbeat (UDP) and the call server of gtopk.run (TCP) at 10.0.0.5 (eth0)" in detail
    assert "metrics (TCP) at 127.0.0.1 (lo)" in detail
    assert advice == ""


@pytest.mark.parametrize(
    ("own", "advice"), [(RENTED, FIREWALL), (WITH_VPN, f"{FIREWALL}, or: {VPN}")]
)
def test_heartbeat_at_a_public_address_is_a_warning(own, advice: str) -> None:
    state, detail, found_advice = finding_for(BY_ROUTE, own)
    assert state is State.WARN
    assert f"heartbeat (UDP) and the call server of gtopk.run (TCP) at {PUBLIC} (eth0)" in detail
    assert "by default route" in detail
    assert found_advice == advice


def test_named_interface_applies_to_the_heartbeat_alone() -> None:
    state, detail, _ = finding_for(Choice("10.8.0.2", "GTOPK_INTERFACE"), WITH_VPN)
    assert state is State.OK
    assert "the heartbeat (UDP) at 10.8.0.2 (wg0)" in detail
    state, detail, _ = finding_for(Choice(PUBLIC, "GTOPK_INTERFACE"), WITH_VPN)
    assert state is State.WARN
    assert f"the heartbeat (UDP) at {PUBLIC} (eth0), by GTOPK_INTERFACE" in detail


def test_disabled_heartbeats_open_no_port() -> None:
    assert finding_for(BY_ROUTE, RENTED, GTOPK_HEARTBEAT_TIMEOUT="0")[0] is State.OK


@pytest.mark.parametrize(
    ("setting", "reached"),
    [
        ("9400", ""),
        ("10.8.0.2:9400", ""),
        (f"{PUBLIC}:9400", f"{PUBLIC} (eth0)"),
        ("0.0.0.0:9400", f"{PUBLIC} (eth0)"),
        ("[::]:9400", f"{PUBLIC_IPV6} (eth0)"),
    ],
)
def test_metrics_port_is_checked_at_its_own_address(setting: str, reached: str) -> None:
    private = Choice("10.8.0.2", "GTOPK_INTERFACE")
    state, detail, advice = finding_for(private, WITH_VPN, GTOPK_PROMETHEUS=setting)
    assert (state is State.WARN) == bool(reached)
    if reached:
        assert detail == f"the internet may reach metrics (TCP) at {reached}, by GTOPK_PROMETHEUS"
        assert advice == f"{FIREWALL}, or: export GTOPK_PROMETHEUS=9400"


@pytest.mark.parametrize(
    ("name", "stands_for", "reached"),
    [
        (PUBLIC, PUBLIC, True),
        ("node1", PUBLIC, True),
        ("node1", "127.0.1.1", True),  # then rank 0 listens at all addresses
        ("localhost", "127.0.0.1", False),
        ("node1", "10.8.0.2", False),
        ("node2", "93.184.216.35", False),  # another host's
    ],
)
def test_rendezvous_port_is_checked_where_rank_0_serves_it(
    monkeypatch, name: str, stands_for: str, reached: bool
) -> None:
    monkeypatch.setattr(isolation, "_resolved", {name: stands_for}.get)
    private = Choice("10.8.0.2", "GTOPK_INTERFACE")
    meeting = {"MASTER_ADDR": name, "MASTER_PORT": "29500"}
    state, detail, advice = finding_for(private, WITH_VPN, **meeting)
    assert (state is State.WARN) == reached
    if reached:
        assert f"the rendezvous (TCP) at {PUBLIC} (eth0), by MASTER_ADDR" in detail
        assert advice.endswith("export MASTER_ADDR=10.8.0.2")
    assert finding_for(private, WITH_VPN, **meeting, TORCHELASTIC_RUN_ID="1")[0] is State.OK


def test_finding_uses_the_interfaces_of_this_host(monkeypatch) -> None:
    monkeypatch.setattr(isolation, "interfaces", lambda: dict([LOOPBACK, ("eth0", PUBLIC)]))
    monkeypatch.setattr(isolation, "choose_address", lambda one_host: BY_ROUTE)
    monkeypatch.delenv("GTOPK_HEARTBEAT_TIMEOUT", raising=False)
    assert check_ports().state is State.WARN
    monkeypatch.setattr(isolation, "interfaces", lambda: dict([LOOPBACK, ("eth0", "10.0.0.5")]))
    monkeypatch.setattr(
        isolation, "choose_address", lambda one_host: Choice("10.0.0.5", "default route")
    )
    assert check_ports().state is State.OK


def test_own_addresses_include_ipv6() -> None:
    own = isolation.own_addresses()
    assert ("lo", "127.0.0.1") in own
    if socket.has_ipv6 and isolation._IPV6.exists() and "lo" in isolation._IPV6.read_text():
        assert ("lo", "::1") in own
