"""Steps whose buckets PyTorch hands over one by one, through hooks of DDP and FSDP.

one_step.py       all buckets of a step count, or none
hook_steps.py     what such steps cost
hook_skips.py     backward passes that do not count
optimizer_checks.py whose momentum is not to be taken twice
bucket_exchanges.py   exchanges of buckets, which may change
fsdp_units.py     of which parameters FSDP's vectors are
"""
