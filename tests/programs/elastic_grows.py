"""Elastic training on as many ranks as there are, until a given file exists.

Argument: that file. Every start checks that the sum of the residuals is that of the commit, then
prints the number of ranks and the step from which it resumes.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import light_torch  # noqa: F401

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gtopk.torch as hvd
from tests.gtopk.held import held

STEPS_A_COMMIT = 5


def held_by_all(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return hvd.allreduce(torch.from_numpy(held(optimizer)).double(), op=hvd.Sum, name="held")


def main() -> None:
    hvd.init()
    model = torch.nn.Linear(40, 20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        hvd.Compression.gtopk(density=0.1),
    )

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        if state.held is not None:
            torch.testing.assert_close(held_by_all(optimizer), state.held, rtol=1e-6, atol=1e-7)
        say(f"begins on {hvd.size()} at step {state.step}")
        while not state.enough:
            for _ in range(STEPS_A_COMMIT):
                optimizer.zero_grad()
                inputs = torch.randn(8, 40)
                (model(inputs) - inputs[:, :20]).square().mean().backward()
                optimizer.step()
                time.sleep(0.02)
            state.step += STEPS_A_COMMIT
            state.held = held_by_all(optimizer)
            state.enough = hvd.broadcast_object(Path(sys.argv[1]).exists(), name="enough")
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, step=0, held=None, enough=False))
    parameters = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    say(f"ends with {hashlib.blake2b(parameters, digest_size=8).hexdigest()}")


def say(text: str) -> None:
    print(f"rank {hvd.rank()} {text}\n", end="", flush=True)


main()
