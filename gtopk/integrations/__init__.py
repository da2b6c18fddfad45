"""Parts shared by `gtopk.ddp`, `gtopk.fsdp` and the modules on top: PyTorch hands over buckets.

ddp_passes.py         buckets and parameters of a backward pass, as DDP hands them to a hook
bucket_exchanges.py   an exchange for each bucket, kept when PyTorch rebuilds its buckets
adam.py               Adam's steps, which the hook makes in the optimizer's place
frameworks.py         a hook's state for a framework's optimizers and checkpoints
optimizer_checks.py   checks of an optimizer at its first step
hook_state.py         a step's buckets: all count or none does; its report; skipped steps
fsdp_units.py         which parameters are in FSDP's flat vectors, and which ranks hold them
fsdp_adam.py          Adam's steps of shards, with the optimizer's state as DTensors
"""
