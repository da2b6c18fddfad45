"""A message that changes in transit is an error that names its sender; nothing of it is applied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport, local_world, run_ranks
from collectives.wire.message import MAGIC
from gtopk.compression import Compression
from gtopk.errors import HorovodInternalError
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world

SIZE, CULPRIT, STEP = 4, 2, 3
DENSE_BYTES = 20_000  # of a part of the gradients, if they are sent whole
WIDTH, WIDE = 30, 4000  # inputs of the model


class Mutating:
    """Replaces a rank's `send_on`: changes its gradient messages from a given step on.

    everything: also change messages that have no checksum of their own.
    """

    def __init__(
        self, transport: LocalTransport, place: float, flip: int, everything: bool = False
    ) -> None:
        self.send_on = transport.send_on
        self.place, self.flip = place, flip
        self.everything = everything
        self.active = False
        self.changed = 0

    def __call__(self, stream: Any, message: np.ndarray, to: int) -> Any:
        begin, size = 0, message.size
        is_dense = size >= DENSE_BYTES
        # In an allgather, its own message comes first.
        if not is_dense and size > 16 and message[:8].view(np.int64)[0] < SIZE:
            count, size = message[:16].view(np.int64)
            begin = 8 * (1 + count)
        if self.everything and "gradients" in stream.activity:
            begin, size, is_dense = 0, message.size, True
        if self.active and (is_dense or message[begin:].tobytes().startswith(MAGIC)):
            message = message.copy()
            message[begin + int(self.place * (size - 1))] ^= self.flip
            self.changed += 1
        return self.send_on(stream, message, to)


def train(transport: LocalTransport, compression: Any, mutating: Mutating) -> tuple[str, list[Any]]:
    """Return the error that ended the training, and the parameters after each completed step."""
    is_wide = compression is Compression.none and not mutating.everything
    width = WIDE if is_wide else WIDTH
    model = torch.nn.Linear(width, 7)
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    done = [model.weight.detach().clone()]
    try:
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(), compression
            )
            for step in range(STEP + 2):
                optimizer.zero_grad()
                mutating.active |= step == STEP and transport.rank == CULPRIT
                generator = torch.Generator().manual_seed(10 * step + transport.rank)
                model(torch.randn(5, width, generator=generator)).square().sum().backward()
                optimizer.step()
                done.append(model.weight.detach().clone())
    except HorovodInternalError as error:
        assert torch.equal(model.weight, done[-1]), "a step that fails changes nothing"
        return str(error), done
    return "", done


@pytest.mark.parametrize(
    "compression", [Compression.gtopk(0.2), Compression.topk(0.2), Compression.none], ids=str
)
def test_flipped_bit_is_an_error_naming_its_sender_and_is_not_applied(compression):
    """Ranks that got all messages intact may complete the step, with the right result."""
    runs = []
    for place, flip in ((0.0, 0), (0.0, 8), (0.3, 1), (0.7, 128), (1.0, 1)):
        transports = local_world(SIZE, timeout_seconds=20)
        mutating = Mutating(transports[CULPRIT], place, flip)
        transports[CULPRIT].send_on = mutating
        runs.append(run_ranks(transports, lambda t, m=mutating: train(t, compression, m)))
        assert mutating.changed
    (_, undisturbed), *_ = runs[0]
    assert len(undisturbed) == 1 + STEP + 2
    for ranks in runs[1:]:
        for rank, (text, done) in enumerate(ranks):
            assert text
            if rank != CULPRIT:
                assert f"the message from rank {CULPRIT} is malformed" in text, text
            assert text.count(f"at step {len(done) - 1}") == 1, text
            assert STEP < len(done) <= STEP + 2
            assert all(map(torch.equal, done, undisturbed))
        assert any(len(done) == STEP + 1 for _, done in ranks)


@pytest.mark.parametrize("compression", [Compression.gtopk(0.2), Compression.none], ids=str)
def test_check_messages_setting_detects_a_flipped_bit_in_short_messages(compression, monkeypatch):
    """Without changes in transit, the result has the same bits as without checks."""

    def run(place: float, flip: int) -> list[tuple[str, list[Any]]]:
        transports = local_world(SIZE, timeout_seconds=20)
        mutating = Mutating(transports[CULPRIT], place, flip, everything=True)
        transports[CULPRIT].send_on = mutating
        ranks = run_ranks(transports, lambda t: train(t, compression, mutating))
        assert mutating.changed
        return ranks

    (_, unchecked), *_ = run(0.0, 0)
    monkeypatch.setenv("GTOPK_CHECK_MESSAGES", "1")
    (_, undisturbed), *_ = run(0.0, 0)
    assert len(undisturbed) == 1 + STEP + 2
    assert all(map(torch.equal, undisturbed, unchecked))
    for place, flip in ((0.0, 1), (0.5, 16), (1.0, 128)):
        for rank, (text, done) in enumerate(run(place, flip)):
            assert rank == CULPRIT or f"the message from rank {CULPRIT} is malformed" in text, text
            assert len(done) <= STEP + 2
            assert all(map(torch.equal, done, undisturbed))
