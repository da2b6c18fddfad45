"""DistributedOptimizer: one step, from the gradients of backward to the same update on all ranks.

distributed.py      DistributedOptimizer; adasum.py: the same for op=Adasum
options.py          its arguments, checked
gradient_checks.py  refuses momentum taken twice, gradients exchanged or unscaled before
wrapped/            the optimizer that a script made, its Adam moments, its state, its properties
                    and its interface for the adaptive modes; checkpoint.py: residuals saved, and
                    divided over another number of ranks
hooks.py            backward hooks: which gradients and buckets are complete
bucket_plan.py      which parameters go into one bucket; planned_buckets.py: the buckets in use
reducer.py          runs a whole step over all buckets, also while backward goes on
step_transaction.py all buckets of a step count, or none does
peers.py            the ranks of a step, and the part of one that has joined
samples.py          how many samples a rank's gradient stands for, and its weight
step_checks.py      counts skipped steps, with a limit in a row; checks that parameters are
                    bit-identical on all ranks
expected_step.py    the predicted time of a step, once the links are measured
"""
