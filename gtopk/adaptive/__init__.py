"""Adaptive batches: each rank's batch follows its speed.

adapt.py           `hvd.adapt`, the one line that a script needs, and the modes by name
loader_base.py     shared by the loaders of all modes: epochs, drains, states, the next world
options.py         the options of the modes
balanced.py        "balanced": synchronous steps of one global batch, divided by speed
delayed_sync/      "abs": delayed synchronous rounds of micro-batches
model_averaging/   "adaptive-sgd": each rank trains a replica; replicas are merged now and then
hogbatch/          "hogbatch", "adaptive-hogbatch": the workers of one server share one model
throughput.py      how fast each rank is; controller.py: when batch sizes change, and by how much
partitioning/      which samples each rank gets; sources.py: how they are read
replica.py         for modes without a common step: a rank's own model, sums of gradients
local_steps.py     the step that replaces the optimizer's in these modes, and its reports
current_batch.py   the batch of the next step, its learning rate, and parts that fit into memory
noise_scale.py     the gradient noise scale, which shows how large the global batch should be
"""
