"""Planning: it says before the first step whether compression pays.

comparison.py    every method's step on a given cluster, and which one pays
bucket_plan.py   how parameters are dealt to buckets
advice.py        the line that a job starts with, and the seconds that its buckets are to take
"""
