"""Run examples under torchrun on 2 ranks, by name, each after its dense variant."""

import importlib
import logging
import sys

import torch
import torch.distributed as dist

import gtopk.torch as hvd

# Their arguments, and a loss that an untrained network does not reach.
SHORT: dict[str, tuple[list[str], float]] = {
    "images": (["--epochs", "4"], 1.5),
    "nanogpt": (
        ["--steps", "60", "--width", "32", "--layers", "2", "--context", "32"],
        4.0,  # 5.5 at the start
    ),
    "two_sites": (["--epochs", "8", "--inner-steps", "8"], 1.5),
    "trainer": (["--epochs", "3"], 1.5),
    "fabric": (["--epochs", "3"], 1.5),
    "finetune": (["--steps", "20"], 5.0),
}

logging.getLogger("lightning").setLevel(logging.ERROR)
dist.init_process_group("gloo")
for name in sys.argv[1:]:
    main = importlib.import_module(f"mpi_scripts.examples.{name}").main
    short, good = SHORT[name]
    dense, ours = main([*short, "--dense"]), main(short)
    assert dense < good, f"{name}, dense: {dense}"
    assert ours < good, f"{name}: {ours}"
    assert ours != dense, f"{name}: one way was both ways: {dense}"
    hvd.init()
    both = hvd.allgather(torch.tensor([[dense, ours]], dtype=torch.float64))
    assert torch.equal(both[0], both[1]), f"{name}: ranks end with other models: {both}"
    print(f"{name} is learned\n", end="", flush=True)
dist.destroy_process_group()
