"""Parse hosts in horovodrun's syntax."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gtopk.runtime.launch.job import Host, parse_hosts, read_hostfile, refuse_too_few_slots


def test_parse_hosts_reads_names_and_slots() -> None:
    assert parse_hosts("one:4, two:2,three") == [Host("one", 4), Host("two", 2), Host("three", 1)]


@pytest.mark.parametrize("text", ["", "one,,two", "one:0", "one:00", "one:two", "one:2:3"])
def test_invalid_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hosts must look like 'one:4,two:2', got"):
        parse_hosts(text)


def test_read_hostfile_reads_a_host_per_line_and_refuses_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\none slots=4\n\ntwo slots = 2  # slow\nthree\n")
    assert read_hostfile(path) == [Host("one", 4), Host("two", 2), Host("three", 1)]
    for line in ("one 4", "one:4"):
        path.write_text(f"{line}\n")
        with pytest.raises(ValueError, match=f"must look like 'name slots=4', got '{line}'"):
            read_hostfile(path)
    path.write_bytes(b"\xff \xff" * 100)
    with pytest.raises(ValueError, match=r"must look like 'name slots=4', got '.{79}$"):
        read_hostfile(path)
    path.write_text("# nobody\n")
    with pytest.raises(ValueError, match="must name at least one host"):
        read_hostfile(path)


def test_more_ranks_than_slots_are_refused() -> None:
    hosts = parse_hosts("one:2,two")
    refuse_too_few_slots(hosts, 3)
    with pytest.raises(ValueError, match=r"4 ranks need .* \(one:2, two:1\) have 3"):
        refuse_too_few_slots(hosts, 4)


def test_is_this_one_knows_the_names_of_this_host() -> None:
    for name in ("localhost", "127.0.0.1", socket.gethostname()):
        assert Host(name, 1).is_this_one
    assert not Host("elsewhere", 1).is_this_one
