"""Handlers: how a value of some type is saved, restored, synchronized and committed to disk."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ...optim.distributed import _DistributedOptimizer
from ...optim.wrapped.checkpoint import KEY
from ..checkpoint.archive import Owned
from ..checkpoint.residuals import share
from ..functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .left_out import WHERE_KEPT, left_out


class StateHandler:
    """How one value of a state is handled; a subclass for a type of your own goes to the registry.

    The last four methods are for commits to disk only (GTOPK_ELASTIC_DIR).
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy the value, for `restore`."""
        raise left_out(self, "save")

    def restore(self) -> None:
        """Return the value to what was saved last."""
        raise left_out(self, "restore")

    def sync(self) -> None:
        """Make the value that of rank 0, on every rank."""
        raise left_out(self, "sync")

    def set_value(self, value: Any) -> None:
        """Handle another value from now on."""
        self.value = value
        self.save()

    def reset(self) -> None:
        """Reset what depends on the ranks, which have come together anew."""

    def saved(self) -> Any:
        """Return what was saved and is the same on all ranks, in types of the object codec."""
        raise left_out(self, "saved() and resume", WHERE_KEPT)

    def saved_here(self) -> Any:
        """Return what was saved and is this rank's alone; None: nothing."""
        return None

    def resume(self, saved: Any) -> None:
        """Take over what `saved` returned in a job that ended."""
        raise left_out(self, "saved() and resume", WHERE_KEPT)

    def resume_here(self, owned: Sequence[Owned], ranks: int) -> None:
        """Take over what `saved_here` returned on none, one or more ranks of that job.

        ranks: how many that job had. Called on every rank, after `sync`; together they get each
        rank's part once, and as many ranks as there were each its own.
        """


class StateDictHandler(StateHandler):
    """Handles what has state_dict() and load_state_dict()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: an optimizer goes on in the very tensors that it loads.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()

    def saved(self) -> Any:
        return self._saved

    def resume(self, saved: Any) -> None:
        self.value.load_state_dict(saved)


class ModelStateHandler(StateDictHandler):
    """Handles a module: parameters and buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateDictHandler):
    """Handles an optimizer: its options and state are every rank's, a residual each rank's own.

    Within a round of LocalSGD all ranks become rank 0 as it was, by this and the model's handler.
    """

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()

    def restore(self) -> None:
        super().restore()
        if KEY not in self._saved and isinstance(self.value, _DistributedOptimizer):
            self.value.forget_steps()

    def saved(self) -> Any:
        return {key: part for key, part in self._saved.items() if key != KEY}

    def saved_here(self) -> Any:
        return self._saved.get(KEY)

    def resume_here(self, owned: Sequence[Owned], ranks: int) -> None:
        """Hold back the sum of what those ranks did: on fewer ranks nothing of it is lost."""
        held = share(dict(owned), ranks)
        if held is not None:
            self.value.load_state_dict({**self.value.state_dict(), KEY: held})


class SamplerStateHandler(StateDictHandler):
    """Handles an ElasticSampler: how far the epoch is."""

    def reset(self) -> None:
        self.value.reset()


class LoaderStateHandler(StateDictHandler):
    """Handles a loader of `adapt` in mode "balanced": how far the epoch is, and its sizes."""

    def reset(self) -> None:
        # An interrupt restores nothing, and may synchronize nothing.
        self.value.load_state_dict(self.value.state_dict())


class LRSchedulerStateHandler(StateDictHandler):
    """Handles a learning rate scheduler."""
