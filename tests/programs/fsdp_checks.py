"""Run under torchrun on 4 ranks, with an empty folder: all that replicas of two shards promise.

What is saved into the folder, fsdp_resume.py goes on with on fewer ranks.
"""

import sys

import fsdp_adamw
import fsdp_hook
import fsdp_overlap
import fsdp_resume
import fsdp_used_in_part
import torch
from checks import run_tests

import gtopk.torch as hvd

if __name__ == "__main__":
    for checks, said in (
        (fsdp_hook, "shards are replicated"),
        (fsdp_overlap, "backward goes on"),
        (fsdp_adamw, "replicas make AdamW's steps"),
        (fsdp_used_in_part, "nothing is lost"),
    ):
        run_tests(vars(checks))
        print(f"rank {fsdp_hook.RANK}: {said}\n", end="", flush=True)
    fsdp_resume.save(sys.argv[1])
    hvd.shutdown()
    torch.distributed.destroy_process_group()
