"""Run under mpirun on 2 ranks or more, with a folder: LocalSGD trains, is saved, and resumes."""

import sys

import light_torch  # noqa: F401

import torch
from checks import same_bits_everywhere, weights

import gtopk
import gtopk.torch as hvd

hvd.init()


def begin(fragments: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = gtopk.LocalSGD(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        inner_steps=4,
        compression=hvd.Compression.gtopk(density=0.2),
        overlap_steps=fragments - 1,
        fragments=fragments,
        named_parameters=model.named_parameters(),
    )
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()


for fragments in (1, 3):
    folder = f"{sys.argv[1]}/{fragments}"
    model, optimizer = begin(fragments)
    train(model, optimizer, range(10))
    assert not same_bits_everywhere(weights(model)), "replicas part in the middle of a round"
    gtopk.save_checkpoint(folder, model, optimizer, step=10)
    train(model, optimizer, range(10, 16))
    optimizer.outer_step()
    assert same_bits_everywhere(weights(model))

    other, resumed = begin(fragments)
    assert gtopk.load_latest(folder, other, resumed) is not None
    train(other, resumed, range(10, 16))
    resumed.outer_step()
    assert torch.equal(weights(other), weights(model))
print("local steps, one model\n", end="", flush=True)
