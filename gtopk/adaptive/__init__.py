"""Adaptive batches: every rank gets as many samples as its speed is good for.

adapt.py           the one line that a script has of it, and the modes by name
options.py         what may be turned
balanced.py        "balanced": synchronous steps of one global batch, divided by speed
delayed_sync/      "abs": delayed synchronous rounds of micro-batches
model_averaging/   "adaptive-sgd": replicas of their own, merged now and then
hogbatch/          "hogbatch", "adaptive-hogbatch": the workers of one server share one model
throughput/        how fast each rank is, and how many samples it gets for that
partitioning/      which samples each rank gets; batches/: how they are read
local_training/    what the modes have in common whose ranks step by themselves
memory.py          what becomes of batches that do not fit
learning_rate.py   how a step grows with its batch
noise_scale.py     how large the batch should be
"""
