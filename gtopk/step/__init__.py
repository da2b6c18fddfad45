"""A step: gradients become what all ranks agreed on, while backward goes on.

options.py          what may be asked of it; momentum.py: of an optimizer's momentum beside it
reducer.py          the whole of it, from the first gradient to the last
hooks.py            which gradients are there
samples.py          of how many samples; weights.py: so, what they weigh
bucket_plan.py      which parameters share a bucket
bucket_layout.py    which buckets there are, as rank 0 says; planned_buckets.py: as all have them
overlap.py          buckets that are complete go ahead
step_transaction.py one try: all buckets are exchanged before any counts
peers.py            the ranks that do so together; join_shadow.py: one of which has joined
grad_scaler.py      GradScaler's scale
skipped_steps.py    steps that no rank applied; skip_counter.py: too many of them
expectation.py      what an exchange is to take; expected_step.py: once links are measured
advice.py           and what a run is told of it
listener.py         what is told of steps
"""
