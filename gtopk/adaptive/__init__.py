"""Adaptive batches: every rank gets as many samples as its speed is good for.

adapt.py           `hvd.adapt`, the one line of it in a script, and the modes by name
loader_base.py     what the loaders of all modes share: epochs, drains, states, the next world
options.py         the options of the modes
balanced.py        "balanced": synchronous steps of one global batch, divided by speed
delayed_sync/      "abs": delayed synchronous rounds of micro-batches
model_averaging/   "adaptive-sgd": replicas of their own, merged now and then
hogbatch/          "hogbatch", "adaptive-hogbatch": the workers of one server share one model
throughput/        how fast each rank is, and how many samples it gets for that
partitioning/      which samples each rank gets; sources.py: how they are read
local_training/    for modes whose ranks step by themselves: replicas, rounds, step reports
memory.py          batches that do not fit into memory are computed in parts
current_batch.py   the batch that the next step is of, and how the step grows with it
noise_scale.py     how large the batch should be
"""
