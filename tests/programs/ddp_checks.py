"""Run under torchrun on 2 ranks or more: checks of gTop-k as DDP's communication hook."""

import ddp_hook
import ddp_saved
import ddp_shards
import torch
from checks import run_tests

import gtopk.torch as hvd

if __name__ == "__main__":
    for checks, promise in (
        (ddp_hook, "does as it says"),
        (ddp_saved, "saves as it says"),
        (ddp_shards, "exchanges shards"),
    ):
        run_tests(vars(checks))
        print(f"rank {ddp_hook.RANK}: the hook {promise}\n", end="", flush=True)
    hvd.shutdown()
    torch.distributed.destroy_process_group()
