"""Planning: predicts before the first step whether compression pays.

comparison.py    predicts each method's step time on a given cluster, and which method pays
advice.py        the advice that a job logs first, and the predicted seconds of its buckets
"""
