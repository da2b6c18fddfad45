"""Shares: samples in whole numbers, divided over the ranks.

cuts.py      one order of all samples, cut into steps and batches; micro-batches dealt by speed;
             whole shares, within bounds
cursor.py    a shared place in the samples: a rank that is free takes the next ones
"""
