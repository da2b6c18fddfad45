"""Where the ranks of torch.distributed meet, and that their messages are the host's."""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np
import pytest
import torch

from collectives.transports import Transport
from collectives.transports.torch_distributed import connect, listen


@pytest.mark.parametrize(
    ("host", "resolved", "listens_at"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node7", "127.0.1.1", "0.0.0.0"),  # what many hosts have for their own name
        ("service", "192.0.2.1", "0.0.0.0"),  # of no interface of this host
    ],
)
def test_where_ranks_meet_is_reached_from_where_they_call(
    monkeypatch: pytest.MonkeyPatch, host: str, resolved: str, listens_at: str
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    with listen(host, 0) as listener:
        assert listener.getsockname()[0] == listens_at


def test_the_store_is_served_at_the_address_that_was_given() -> None:
    store = connect("127.0.0.1", 0, 0, 10)
    store.set("key", "value")
    assert connect("127.0.0.1", store.port, 1, 10).get("key") == b"value"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), 5)


def test_messages_are_the_hosts_whatever_the_default_device(
    in_world: Callable[..., object],
) -> None:
    def program(transport: Transport) -> list[int]:
        with torch.device("meta"):
            gathered = transport.allgather(np.array([transport.rank], np.uint8))
        return [int(message[0]) for message in gathered]

    assert in_world("torch.distributed", 2, program) == [[0, 1]] * 2
