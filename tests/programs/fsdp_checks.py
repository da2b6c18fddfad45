"""Run under torchrun on 4 ranks, with an empty folder: checks of replicas of two shards.

fsdp_resume.py resumes on fewer ranks from the states saved in the folder.
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
    for checks, promise in (
        (fsdp_hook, "shards are replicated"),
        (fsdp_overlap, "backward goes on"),
        (fsdp_adamw, "replicas make AdamW's steps"),
        (fsdp_used_in_part, "nothing is lost"),
    ):
        run_tests(vars(checks))
        print(f"rank {fsdp_hook.RANK}: {promise}\n", end="", flush=True)
    fsdp_resume.save(sys.argv[1])
    hvd.shutdown()
    torch.distributed.destroy_process_group()
