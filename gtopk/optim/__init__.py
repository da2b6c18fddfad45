"""DistributedOptimizer: one step, from the gradients of backward to the same update on all ranks.

distributed.py      DistributedOptimizer; adasum.py: the optimizer for op=Adasum
options.py          the checked arguments of DistributedOptimizer
gradient_checks.py  refuses doubled momentum, and gradients already exchanged or unscaled
wrapped/            the script's optimizer: Adam moments, state, properties, and the interface for
                    the adaptive modes; checkpoint.py: saves residuals, and redistributes them to
                    another number of ranks
hooks.py            backward hooks: track which gradients and buckets are complete
bucket_plan.py      which parameters share a bucket; planned_buckets.py: the buckets in use
reducer.py          runs a whole step over all buckets, overlapped with backward
step_transaction.py either all buckets of a step count, or none
peers.py            the ranks of a step, and the part of a rank that has joined
samples.py          the sample count of a rank's gradient, and the weight that follows from it
step_checks.py      counts skipped steps, and limits them in a row; checks that parameters are
                    bit-identical on all ranks
expected_step.py    the predicted time of a step, once the links are measured
"""
