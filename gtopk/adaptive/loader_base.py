"""LoaderBase: the common part of the loaders of all adaptive modes; Epochs counts their epochs.

A state names the mode that it was saved with, and other modes refuse it. Ranks that drain within an
epoch wait until all ranks drain. After elastic's recovery, or `shutdown` and `init`, mode
"balanced" continues in the next world, because only its current batch is pending. The gradients,
replicas and shared models of the other modes end with their world.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ..runtime.coordinator.operation import Operation, Work, do_nothing
from ..runtime.world import world
from ..runtime.world.membership import World
from .options import Job, O_co
from .sources import order_of


class LoaderBase(ABC, Generic[O_co]):
    """Yields this rank's batches, with one optimizer step for each.

    A mode derives from it and implements its iteration (`_batches`), its state (`_state`, `_load`),
    and how ranks finish pending work (`drain`).

    way_out:      advice in the message when the loader's world is over.
    num_samples:  this rank's samples in the current batch; 0 for a placeholder without weight.
    drain_wanted: other ranks drain, and wait until this one does.
    """

    way_out: ClassVar[str] = (
        "create it and its DistributedOptimizer again, as within the function that "
        "hvd.elastic.run decorates; or use mode 'balanced', whose loader continues"
    )

    def __init__(self, job: Job[O_co], mode: str) -> None:
        self._mode, self._world, self._optimizer = mode, job.world, job.optimizer
        self._options = job.options
        self.dataset = job.loader.dataset
        self._epochs = Epochs(job.loader)
        self.num_samples = 0
        self.drain_wanted = False

    @abstractmethod
    def _batches(self) -> Generator[Any, None, None]:
        """Yield the batches of one iteration."""

    @abstractmethod
    def drain(self) -> None:
        """Finish pending work with all ranks; call it before a checkpoint or an evaluation."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the state that later batches depend on, without the mode's name."""

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Close the open iteration, and resume from a state; the epoch is loaded after it."""

    def _set_order(self, job: Job[Any]) -> int:
        """Set the order of the data set's samples, and return their number."""
        length = len(job.loader.dataset)  # type: ignore[arg-type]
        self._order = job.order or order_of(job.loader, length, job.options.seed)
        return length

    def _run_first(self, signature: Sequence[str], work: Work = do_nothing, flags: int = 0) -> Any:
        """Name this loader's operations, and run the first of them, as `_run` does.

        Also raises HorovodInternalError, on every rank, if modes or options differ.
        """
        # From the counter of unnamed operations: ranks that create their loaders in the same order
        # get the same names.
        self._name = f"adapt.{next(self._world.sets[0].unnamed)}"
        signature = [f"mode={self._mode!r}", *signature, *self._options.signature()]
        return self._world.engine.submit(self._name, signature, work, flags=flags).wait()

    def _run(
        self, what: str, signature: Sequence[str], work: Work = do_nothing, flags: int = 0
    ) -> Any:
        """Run `work` on all ranks together; return its result.

        what: ends the operation's name. signature: words that must be equal on all ranks.
        """
        name = f"{self._name}.{what}"
        return self._await(self._world.engine.submit(name, signature, work, flags=flags))

    def _await(self, operation: Operation) -> Any:
        return operation.wait()

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches until every sample has been in a batch of one rank."""
        return self._epochs.loop(self._batches(), self._world.rank)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch; without a call, each iteration is the next epoch."""
        self._epochs.set(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, and the state that later ones depend on.

        Raises RuntimeError if a state would lose pending work: call drain() first.
        """
        return {"mode": self._mode, **self._state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where another loader stopped: the same samples are left, in the same order.

        Raises ValueError for a state of another mode, or one that does not fit this loader.
        """
        if state["mode"] != self._mode:
            raise ValueError(
                f"this loader's mode is {self._mode!r}, the state's {state['mode']!r}; create the "
                "loader with the mode of the state"
            )
        self.drain_wanted = False
        self._load(state)
        self._epochs.load_state_dict(state["epochs"])

    def _settle_drains(self, drain_flags: Sequence[int], counted: str, number: int) -> bool:
        """Return whether all ranks drain or all continue; if they differ, ask the others to drain.

        drain_flags: for every rank, whether it drains.
        counted, number: name and value of the loader's counter that decides when scripts drain.
        Raises RuntimeError, on every rank, if a rank continues although it was asked to drain.
        """
        all_agree = len(set(drain_flags)) == 1
        # They differ a second time although all were asked. Every rank has the same `drain_flags`
        # and was asked at the same time, so all raise.
        if not all_agree and self.drain_wanted:
            drained = [rank for rank, each in enumerate(drain_flags) if each]
            others = [rank for rank, each in enumerate(drain_flags) if not each]
            raise RuntimeError(
                f"rank {self._world.rank}: ranks {drained} called loader.drain() at {counted} "
                f"{number}, and ranks {others} did not; every rank must call it (or "
                "gtopk.save_checkpoint, which does) after the first optimizer.step() that finds "
                f"{counted} at, or above, the same number, or loader.drain_wanted"
            )
        self.drain_wanted = not all_agree
        return all_agree

    def _next_world(self) -> World | None:
        """Return the current world if it has replaced this loader's; else None.

        Raises RuntimeError if this rank or the number of ranks has changed.
        """
        here = self._world
        if not is_over(here):
            return None
        now = world.current()
        if (now.rank, now.size) != (here.rank, here.size):
            raise RuntimeError(
                f"this loader was created on rank {here.rank} of {here.size} but now runs on rank "
                f"{now.rank} of {now.size}; call hvd.adapt() again"
            )
        return now

    def _require_current_world(self) -> None:
        """Raise RuntimeError if the loader's world is over; elastic does not recover from it."""
        if is_over(self._world):
            raise RuntimeError(
                f"rank {self._world.rank}: the loader of hvd.adapt in mode {self._mode!r} cannot "
                "continue after shutdown() or an elastic recovery, which end its pending "
                f"operations: {self.way_out}"
            )


def is_over(here: World) -> bool:
    """Tell whether another world has replaced this one; if none has, operations raise."""
    return world.is_initialized() and world.current() is not here


class Epochs:
    """Counts epochs, follows a DistributedSampler's set_epoch, and resumes within an epoch.

    epoch, start: position of the batch after the last one handed out.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        sampler = loader.sampler
        self._sampler = sampler if isinstance(sampler, DistributedSampler) else None
        self._sampler_epoch = self._sampler.epoch if self._sampler else 0
        self.epoch = self._sampler_epoch
        self.start = 0
        self._iteration: object = None  # None: the next iteration starts at epoch and start
        self._is_left = False  # the script left the iteration early, which ends the epoch
        # The generator that hands out batches.
        self._loop: weakref.ref[Generator[Any, None, None]] | None = None

    def loop(self, batches: Generator[Any, None, None], rank: int) -> Iterator[Any]:
        """Close an unfinished iteration, and yield the batches of this one.

        Raises RuntimeError in a loop that continues after another one has closed it.
        """
        # One iteration at a time: both would move the epoch's position and the optimizer's batch.
        self.close()
        own = self._loop = weakref.ref(batches)
        try:
            for batch in batches:
                yield batch
                if self._loop is not own:
                    raise RuntimeError(
                        f"rank {rank}: this loop over the loader cannot continue: another loop "
                        "was started within it, or a state was loaded. Leave the loop first, on "
                        "all ranks; to inspect a batch, or to evaluate, use a plain DataLoader"
                    )
        finally:
            batches.close()

    def close(self) -> None:
        """End the iteration that hands out batches, if any, as a break would."""
        batches = None if self._loop is None else self._loop()
        self._loop = None
        if batches is not None:
            batches.close()

    @contextmanager
    def iterate(self) -> Iterator[tuple[int, int]]:
        """Call `begin`, and note whether the iteration ends with the epoch or is left early."""
        place = self.begin()
        iteration = self._iteration
        try:
            yield place
        except BaseException:
            # This generator may end after another has begun, an epoch was set, or a state was
            # loaded.
            self._is_left |= iteration is self._iteration
            raise
        if iteration is self._iteration:
            self.finish()

    def begin(self) -> tuple[int, int]:
        """Return the epoch and position to iterate from; an epoch left early counts as over."""
        if self._iteration is not None and self.start:
            self.finish()
        # Scripts still call set_epoch of their DistributedSampler, although nothing draws from it.
        if self._sampler is not None and self._sampler.epoch != self._sampler_epoch:
            self._sampler_epoch = self._sampler.epoch
            self.set(self._sampler_epoch)
        self._iteration, self._is_left = object(), False
        return self.epoch, self.start

    def set(self, epoch: int) -> None:
        """Make the next iteration this epoch; start it from 0 if it is new or was left early."""
        if epoch != self.epoch or self._is_left:
            self._go_to(epoch, 0)

    def reach(self, start: int) -> None:
        """Note how far the iteration has come, even if left; ignored once an epoch is set."""
        if self._iteration is not None:
            self.start = start

    def finish(self) -> None:
        """Move to the next epoch."""
        self._go_to(self.epoch + 1, 0)

    def _go_to(self, epoch: int, start: int) -> None:
        self.epoch, self.start = epoch, start
        self._iteration, self._is_left = None, False

    def state_dict(self, before_leaving: bool = False) -> dict[str, Any]:
        """Return the position of the next batch; in the next epoch if this one was left early.

        before_leaving: return the position before the epoch was left.
        """
        if self._is_left and self.start and not before_leaving:
            return {"epoch": self.epoch + 1, "start": 0}
        return {"epoch": self.epoch, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where another loader stopped."""
        self._go_to(state["epoch"], state["start"])
        # The sampler's current epoch is older than the state: only a later set_epoch counts.
        self._sampler_epoch = self.epoch if self._sampler is None else self._sampler.epoch
