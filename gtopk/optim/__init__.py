"""DistributedOptimizer: one step, from the gradients of backward to the same update on all ranks.

distributed.py      DistributedOptimizer; adasum.py: the same for op=Adasum
options.py          its arguments, checked; momentum.py: momentum that would count twice
double_reduction.py refuses gradients that DDP, or another optimizer, has already reduced
wrapped/            the optimizer that a script made, its Adam moments, its state; checkpoint.py:
                    residuals saved, and divided over another number of ranks
hooks.py            backward hooks: which gradients and buckets are complete
bucket_plan.py      which parameters go into one bucket; planned_buckets.py: the buckets in use
reducer.py          runs a whole step over all buckets, also while backward goes on
step_transaction.py all buckets of a step count, or none does
peers.py            the ranks of a step, and the part of one that has joined
samples.py          how many samples a rank's gradient stands for, and its weight
grad_scaler.py      GradScaler's scale
skip_counter.py     counts skipped steps, with a limit in a row
expected_step.py    the predicted time of a step, once the links are measured
step_policy.py      the interface by which the adaptive modes drive an optimizer
replica_check.py    checks that parameters are bit-identical on all ranks
learning_rates.py   `gtopk.ramp`
"""
