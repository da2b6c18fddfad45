"""A rank's children are not ranks: DataLoader workers know their rank, but cannot communicate."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset


def _send_early_sigterm() -> None:
    if is_early:
        os.kill(os.getpid(), signal.SIGTERM)


# Before gtopk's: the signal comes while the child still has the rank's handler.
is_early = False
os.register_at_fork(after_in_child=_send_early_sigterm)

import gtopk.torch as hvd  # noqa: E402


class Numbers(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        hvd.init()  # does nothing, as the rank has called it
        assert hvd.is_initialized()
        assert (hvd.rank(), hvd.local_rank(), hvd.size()) == (OWN, OWN, SIZE)
        assert hvd.global_process_set.rank() == OWN
        assert hvd.global_process_set.ranks == [*range(SIZE)]
        with pytest.raises(ValueError, match=f"forked from rank {OWN}"):
            hvd.allreduce(torch.ones(1))
        return torch.tensor([float(index)])


hvd.init()
OWN, SIZE = hvd.rank(), hvd.size()
for _ in range(2):
    for batch in DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        total = hvd.allreduce(batch.sum(), op=hvd.Sum)
        assert total == hvd.size() * batch.sum()

is_early = True
child_id = os.fork()
if child_id == 0:
    time.sleep(5)
    os._exit(0)
is_early = False
assert os.waitstatus_to_exitcode(os.waitpid(child_id, 0)[1]) == -signal.SIGTERM

joins = [sys.executable, "-c", "import gtopk.torch as hvd; hvd.init(); print(hvd.size())"]
child = subprocess.run(joins, capture_output=True, text=True, check=False)
assert child.returncode == 1
assert f"is process {os.getpid()}, which started this one" in child.stderr
way_out = child.stderr.partition("`env ")[2].partition(" python")[0].split()
alone = subprocess.run(["env", *way_out, *joins], capture_output=True, text=True, check=True)
assert alone.stdout == "1\n"
hvd.shutdown()
assert "GTOPK_JOINED" not in os.environ
