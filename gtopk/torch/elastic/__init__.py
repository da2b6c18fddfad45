"""Elastic training: resumes from the last commit after a failure, even if processes died.

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

With GTOPK_ELASTIC_DIR=folder every commit is also written to disk. A job that is restarted with the
same folder resumes from there, on any number of ranks.
"""

from .base import ObjectState, State, run, run_fn
from .sampler import ElasticSampler
from .state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "run_fn"]
