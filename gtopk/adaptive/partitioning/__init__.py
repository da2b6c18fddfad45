"""Shares: samples in whole numbers, divided over the ranks.

cuts.py      one order of all samples, cut into steps and batches; micro-batches dealt by speed;
             whole shares, within bounds
cursor.py    one place that all take from: who is free takes the next
"""
