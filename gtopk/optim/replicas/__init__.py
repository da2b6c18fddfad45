"""Replicas: the ranks' models, the same to the bit, and what is done where they are not.

replicas.py   whether they are the same
check.py      looking now and then
healing.py    the many mend the few
"""
