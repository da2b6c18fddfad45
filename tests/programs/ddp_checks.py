"""Run under torchrun on 2 ranks or more: all that gTop-k as DDP's communication hook promises."""

import ddp_hook
import ddp_saved
import ddp_shards
import torch
from checks import run_tests

import gtopk.torch as hvd

if __name__ == "__main__":
    for checks, said in (
        (ddp_hook, "does as it says"),
        (ddp_saved, "saves as it says"),
        (ddp_shards, "exchanges shards"),
    ):
        run_tests(vars(checks))
        print(f"rank {ddp_hook.RANK}: the hook {said}\n", end="", flush=True)
    hvd.shutdown()
    torch.distributed.destroy_process_group()
