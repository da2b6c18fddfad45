"""Parts shared by `gtopk.ddp`, `gtopk.fsdp` and the modules on top: PyTorch hands over buckets.

hook_state.py         HookState, of which both states derive: a pass, its report, a checkpoint
passes.py             an exchange for each bucket; all buckets of a pass count, or none does; DDP's
                      buckets and parameters, as it hands them to a hook
optimizer_checks.py   the model's optimizers: checked, and without gradients of skipped passes
adam.py               Adam's steps, which the hook makes in the optimizer's place
fsdp_units.py         which parameters are in FSDP's flat vectors, and which ranks hold them; Adam's
                      steps of shards, with the optimizer's state as DTensors
"""
