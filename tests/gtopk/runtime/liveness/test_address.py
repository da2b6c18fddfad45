"""A companion listens only on the chosen interface."""

from __future__ import annotations

import socket

import pytest

from gtopk.runtime.liveness import heartbeat as address
from gtopk.runtime.liveness.heartbeat import address_of, choose_address, own_address
from tests.started import under


def test_own_address_is_loopback_on_one_host():
    assert under({}, own_address, True) == "127.0.0.1"
    assert (
        under({"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.0.0.1"}, own_address, True)
        == "127.0.0.1"
    )


@pytest.mark.parametrize("one_host", [True, False])
def test_own_address_is_of_the_named_interface(one_host):
    assert under({"GTOPK_INTERFACE": "lo"}, own_address, one_host) == "127.0.0.1"


@pytest.mark.parametrize(
    "variable", ["GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "NCCL_SOCKET_IFNAME"]
)
def test_own_address_is_of_the_transports_interface(variable):
    assert under({variable: "nosuch0,lo"}, own_address, False) == "127.0.0.1"


def test_error_of_a_missing_interface_lists_the_available_ones():
    with pytest.raises(ValueError, match=r"GTOPK_INTERFACE must .* got 'nosuch0'; available: .*lo"):
        under({"GTOPK_INTERFACE": "nosuch0"}, own_address, True)


def test_unknown_interface_name_has_no_address():
    assert (
        address_of("")
        == address_of("x" * 100)
        == address_of("nosuch0")
        == address_of("\udc80")
        == ""
    )
    assert address_of("lo") == "127.0.0.1"


def test_too_long_interface_name_is_not_truncated_to_another(monkeypatch):
    monkeypatch.setattr(address.fcntl, "ioctl", lambda file, number, request: request)
    assert address_of("x" * 15) == "0.0.0.0"
    assert address_of("x" * 16) == ""


MASTER, OUTSIDE, LOOPBACK = "10.0.0.1", "192.0.2.1", "127.0.0.1"


@pytest.mark.parametrize(
    ("routes", "addresses", "choice"),
    [
        ({MASTER: "10.0.0.5", OUTSIDE: "10.9.9.9"}, [], ("10.0.0.5", "route to MASTER_ADDR=")),
        ({MASTER: LOOPBACK, OUTSIDE: "10.9.9.9"}, [], ("10.9.9.9", "default route")),
        ({OUTSIDE: "10.9.9.9"}, [], ("10.9.9.9", "default route")),
        ({}, [LOOPBACK, "10.8.8.8", "10.7.7.7"], ("10.8.8.8", "first interface")),
        ({MASTER: LOOPBACK}, [LOOPBACK], ("", "")),
    ],
)
def test_address_without_a_named_interface_follows_the_route_to_others(
    routes, addresses, choice, monkeypatch
):
    monkeypatch.setattr(address, "_address_towards", lambda host: routes.get(host, ""))
    monkeypatch.setattr(address, "interfaces", lambda: dict(enumerate(addresses)))
    found = under({"MASTER_ADDR": MASTER}, choose_address, False)
    assert found.address == choice[0]
    assert found.by.removesuffix(MASTER) == choice[1]


@pytest.mark.parametrize(("host", "own"), [(LOOPBACK, LOOPBACK), ("::1", ""), ("", "")])
def test_address_towards_a_host_is_an_own_address(host, own):
    assert address._address_towards(host) == own


def test_interfaces_without_an_address_are_not_listed(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "nosuch0")])
    assert address.interfaces() == {"lo": LOOPBACK}


def test_own_address_is_not_loopback_between_hosts():
    assert not under({"MASTER_ADDR": "localhost"}, own_address, False).startswith("127.")
