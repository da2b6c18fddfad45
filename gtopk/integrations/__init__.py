"""Parts that `gtopk.ddp`, `gtopk.fsdp` and what builds on them share: PyTorch hands over buckets.

one_step.py           all buckets of a step count, or none does
ddp_passes.py         what DDP hands to a hook in a backward pass
bucket_exchanges.py   an exchange for each bucket, kept when PyTorch rebuilds its buckets
adam.py               Adam's steps, which the hook makes in the optimizer's place
frameworks.py         a state for optimizers that a framework wrapped, and for its checkpoints
hook_skips.py         backward passes that do not count
optimizer_checks.py   checks of an optimizer at its first step
hook_steps.py         the times and bytes of a step
fsdp_units.py         which parameters are in FSDP's flat vectors, and which ranks hold them
fsdp_adam.py          Adam's steps of shards, whose state an optimizer has as DTensors
"""
