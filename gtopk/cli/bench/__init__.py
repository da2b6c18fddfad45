"""`gtopk bench`: benchmarks of this machine and its network.

harness.py     shared code: parser, ranks, spreads over rounds, networks to train
optimizer.py   distributed optimizer steps compared with plain ones
collectives/   every reduction compared with the MPI or gloo allreduce and with the cost model
"""
