"""Elastic training: after a failure it goes on from its last commit, also if processes died.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for index, (inputs, targets) in enumerate(loader):     # with sampler=state.sampler
                ...
                state.sampler.record_batch(index, batch_size)
                if index % 10 == 0:
                    state.commit()
            state.sampler.set_epoch(state.epoch + 1)

    train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))

With GTOPK_ELASTIC_DIR=folder every commit is also on the disk, and a job that is started again with
the same folder goes on from there, on as many ranks as it has then.
"""

from .base import ObjectState, State, run, run_fn
from .sampler import ElasticSampler
from .state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "run_fn"]
