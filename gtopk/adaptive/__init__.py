"""Adaptive batches: every rank gets as many samples as its speed is good for.

adapt.py           the one line that a script has of it
modes.py           the ways to give ranks unlike batches, by name
options.py         what may be turned
balanced.py        synchronous steps of one global batch, divided by speed
delayed/           delayed synchronous rounds of micro-batches: "abs"
merging/           replicas apart, merged now and then: "adaptive-sgd"
hogbatch/          the workers of one server share one model
shares/ speeds/    how many samples each rank gets, and why
batches/           where they come from
memory.py          what becomes of those that do not fit
learning_rate.py   how a step grows with its batch
noise_scale.py     how much it should
apart/             what modes have in common whose ranks step apart
"""
