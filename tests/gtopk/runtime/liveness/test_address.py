"""A companion hears on the interface that was chosen, and on no other."""

from __future__ import annotations

import pytest

from gtopk.runtime.liveness.address import address_of, own_address


def test_on_one_host_no_other_host_is_let_near():
    assert own_address(True, {}) == "127.0.0.1"
    assert (
        own_address(True, {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.0.0.1"}) == "127.0.0.1"
    )


@pytest.mark.parametrize("one_host", [True, False])
def test_the_interface_that_was_named_is_the_one(one_host):
    assert own_address(one_host, {"GTOPK_INTERFACE": "lo"}) == "127.0.0.1"


@pytest.mark.parametrize(
    "variable", ["GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "NCCL_SOCKET_IFNAME"]
)
def test_the_interface_of_the_transport_is_the_heartbeats_too(variable):
    assert own_address(False, {variable: "nosuch0,lo"}) == "127.0.0.1"


def test_an_interface_that_is_not_there_is_an_error_that_lists_those_that_are():
    with pytest.raises(ValueError, match=r"GTOPK_INTERFACE must .* got 'nosuch0'; there are .*lo"):
        own_address(True, {"GTOPK_INTERFACE": "nosuch0"})


def test_a_name_that_is_none_has_no_address():
    assert address_of("") == address_of("x" * 100) == address_of("nosuch0") == ""
    assert address_of("lo") == "127.0.0.1"


def test_between_hosts_the_loopback_is_of_no_use():
    assert not own_address(False, {"MASTER_ADDR": "localhost"}).startswith("127.")
