"""Ray Train with two workers: the model that it prepares uses gTop-k, without an adapter."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

from gtopk.ddp import GTopKState, gtopk_hook

warnings.simplefilter("ignore")
os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise it leaves a token in the home folder


def network() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


def train(config: dict[str, Any]) -> None:
    """Run on every worker."""
    import gtopk.torch as hvd

    weights = []
    for density in (None, 1.0, 0.1):
        model = prepare_model(network())
        if density is not None:
            model.register_comm_hook(GTopKState(density), gtopk_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=generator)).square().mean().backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    dense, all_entries, some = weights
    torch.testing.assert_close(all_entries, dense)
    assert not torch.equal(some, dense)
    assert all(torch.equal(some, other) for other in hvd.allgather(some[None]))
    (Path(config["folder"]) / f"rank {hvd.rank()} of {hvd.size()}").touch()
    hvd.shutdown()


ray.init(
    num_cpus=2,
    include_dashboard=False,
    object_store_memory=128 << 20,  # Ray maps it at once, by default a third of the memory
    log_to_driver=False,
    runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
)
trainer = TorchTrainer(
    train,
    train_loop_config={"folder": sys.argv[1]},
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(storage_path=sys.argv[1]),
)
assert trainer.fit().error is None
ray.shutdown()
assert {path.name for path in Path(sys.argv[1]).glob("rank *")} == {"rank 0 of 2", "rank 1 of 2"}
print("Ray Train uses gTop-k\n", end="", flush=True)
