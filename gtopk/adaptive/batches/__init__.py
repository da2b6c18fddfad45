"""Batches: where the next one comes from, and what becomes of it.

sources.py       from a data set or a stream, cut as the plan says
same_stream.py   whether all ranks read the same stream
epochs.py        where in which epoch the next one lies
current_batch.py the one that the next step is of
drains.py        ranks that ran out wait for those that have not
next_world.py    what becomes of a loader whose world is over
"""
