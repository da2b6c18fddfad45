"""Planning: predicts, before the first step, whether compression pays.

comparison.py    every method's step on a given cluster, and which one pays
advice.py        the line that a job logs first, and the seconds that its buckets should take
"""
