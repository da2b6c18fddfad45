"""Shares: samples in whole numbers, divided over the ranks.

shares.py    in whole grains, within bounds
cuts.py      one order of all samples, cut into steps and batches; micro-batches dealt by speed
cursor.py    one place that all take from: who is free takes the next
"""
