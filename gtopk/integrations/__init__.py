"""Shared parts of `gtopk.ddp`, `gtopk.fsdp` and modules on top, where PyTorch passes buckets.

hook_state.py         HookState, the base of both states: a pass, its report, a checkpoint
passes.py             one exchange per bucket; either all buckets of a pass count, or none; helpers
                      for the buckets and parameters that DDP passes to a hook
optimizer_checks.py   checks the model's optimizers, and drops their gradients of skipped passes
adam.py               Adam's steps, which the hook computes in place of the optimizer
fsdp_units.py         which parameters are in FSDP's flat vectors, and which ranks hold them; Adam's
                      steps of shards, with the optimizer's state as DTensors
"""
