"""gtopk.fsdp: two replicas of two shards, on real ranks of torchrun."""

from __future__ import annotations


def test_replicas_of_shards_exchange_by_gtopk(torchrun):
    job = torchrun(4, "fsdp_hook.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("shards are replicated") == 4
