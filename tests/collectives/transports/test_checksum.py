"""With checks enabled, all messages between ranks are checked, and nothing else changes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import MessageError, local_world, run_ranks
from collectives.transports import reductions, torch_distributed
from collectives.transports.reductions import CHECKSUM_BYTES, append_checksum, strip_checksum
from mpi_scripts.replay.traces import RECEIVED, Recorder

PROGRAM = Path(__file__).parents[2] / "programs" / "collectives_checked.py"


@given(st.binary(max_size=300), st.data())
def test_damaged_checked_message_names_its_sender(content, data):
    message = np.frombuffer(content, np.uint8)
    checked = append_checksum(message)
    assert strip_checksum(checked, 3).tobytes() == content
    place = data.draw(st.integers(0, 8 * checked.size - 1))
    flipped = checked.copy()
    flipped[place // 8] ^= 1 << place % 8
    shorter = checked[: data.draw(st.integers(0, checked.size - 1))]
    for wrong in (flipped, shorter):
        with pytest.raises(MessageError, match=r"rank 3 is malformed: its \d+ bytes do not"):
            strip_checksum(wrong, 3)


def test_message_changed_while_sent_passes_its_checksum(monkeypatch):
    message, checksum_of = np.zeros(100, np.uint8), reductions.checksum_of

    def write_meanwhile(read):
        checksum = checksum_of(read)
        message[50] += 1
        return checksum

    with monkeypatch.context() as patch:
        patch.setattr(reductions, "checksum_of", write_meanwhile)
        checked = append_checksum(message)
    assert message[50] == 1
    assert not strip_checksum(checked, 3).any()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["local", "torch.distributed", "horovod"])
def test_checked_allreduce_detects_a_flipped_bit(in_world, kind, size, monkeypatch):
    monkeypatch.setattr(torch_distributed, "NATIVE_BYTES", 0)
    spec = importlib.util.spec_from_file_location("collectives_checked", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    in_world(kind, size, program.check_checked_messages)


def test_checked_messages_have_exactly_one_checksum():
    def sizes(checks: bool) -> list[int]:
        world = local_world(2, timeout_seconds=30, kind=Recorder)

        def program(transport: Recorder) -> None:
            if checks:
                transport.check_messages()
            transport.allreduce(np.ones(20_000, np.float32))

        run_ranks(world, program)
        return [size for _, size in world[0].events if size != RECEIVED]

    plain = [size for size in sizes(False) if size != CHECKSUM_BYTES]
    assert sizes(True) == [size + CHECKSUM_BYTES for size in plain]
