"""Partitioning: which samples each rank gets.

cuts.py      one order of all samples, cut into steps and batches; micro-batches dealt by speed;
             whole sizes within bounds
cursor.py    a shared position in the samples: a rank that is free takes the next ones
"""
