"""Parts shared by `gtopk.ddp`, `gtopk.fsdp` and the modules on top: PyTorch hands over buckets.

hook_state.py         HookState, of which both states derive: a pass, its report, a checkpoint
bucket_exchanges.py   an exchange for each bucket; all buckets of a pass count, or none does
optimizer_checks.py   the model's optimizers: checked, and without gradients of skipped passes
adam.py               Adam's steps, which the hook makes in the optimizer's place
ddp_passes.py         buckets and parameters of a backward pass, as DDP hands them to a hook
fsdp_units.py         which parameters are in FSDP's flat vectors, and which ranks hold them
fsdp_adam.py          Adam's steps of shards, with the optimizer's state as DTensors
"""
