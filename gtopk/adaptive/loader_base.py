"""What becomes of a loader whose world is over: after elastic's recovery, or `shutdown` and `init`.

In mode "balanced" all that ranks have under way is the batch in hand, so that the loader goes on.
The other modes' gradients, replicas and shared models end with the world.

Drains: ranks that drain within an epoch wait for those that have gone on to come there, too.

Epochs: where in which epoch the next batch lies.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ..runtime.world import world
from ..runtime.world.state import World


def entered(here: World) -> World | None:
    """Return the world of today where it is another one, which has the ranks where they were.

    Raises RuntimeError for other ranks.
    """
    if not is_over(here):
        return None
    now = world.current()
    if (now.rank, now.size) != (here.rank, here.size):
        raise RuntimeError(
            f"this loader was created on rank {here.rank} of {here.size} but now runs on rank "
            f"{now.rank} of {now.size}; call hvd.adapt() again"
        )
    return now


def require_its_world(here: World, mode: str, way_out: str = "") -> None:
    """Raise RuntimeError where the loader's world is over; no failure that elastic recovers from.

    way_out: what to do, where that is not to create optimizer and loader again.
    """
    if not is_over(here):
        return
    raise RuntimeError(
        f"rank {here.rank}: the loader that hvd.adapt made in mode {mode!r} cannot go on after "
        "shutdown() or elastic's recovery, which end what its ranks have under way: "
        + (
            way_out
            or "create it and its DistributedOptimizer again, as within the function that "
            "hvd.elastic.run decorates; or use mode 'balanced', whose loader goes on"
        )
    )


def is_over(here: World) -> bool:
    """Tell whether there is another world by now; without any, operations say so."""
    return world.is_initialized() and world.current() is not here


def all_alike(said: Sequence[int], asked: bool, rank: int, counted: str, number: int) -> bool:
    """Tell whether all ranks drain, or all go on; if not, those that go on are to be asked.

    said: of every rank, whether it drains; asked: whether they were asked before.
    counted, number: what a script goes by, of its loader, and what that is.
    Raises RuntimeError, on every rank, where one goes on although it was asked to drain.
    """
    if len(set(said)) == 1:
        return True
    if asked:
        drained = [rank for rank, each in enumerate(said) if each]
        others = [rank for rank, each in enumerate(said) if not each]
        raise RuntimeError(
            f"rank {rank}: ranks {drained} called loader.drain() at {counted} {number}, and ranks "
            f"{others} did not; every rank must call it (or gtopk.save_checkpoint, which does) "
            f"after the first optimizer.step() that finds {counted} at, or above, the same number, "
            "or loader.drain_wanted"
        )
    return False


class Epochs:
    """Counts epochs, follows a DistributedSampler's set_epoch, and resumes in the middle of one.

    epoch, start: of the batch after the last one handed out.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        sampler = loader.sampler
        self._sampler = sampler if isinstance(sampler, DistributedSampler) else None
        self._followed = self._sampler.epoch if self._sampler else 0
        self.epoch = self._followed
        self.start = 0
        self._iteration: object = None  # None: the next one begins at epoch and start, as they are
        self._is_left = False  # half-way: the epoch is over
        self._loop: weakref.ref[Generator[Any, None, None]] | None = (
            None  # whose batches are handed out
        )

    def loop(self, batches: Generator[Any, None, None], rank: int) -> Iterator[Any]:
        """Yield the batches of an iteration; the one before is closed, where it was not over.

        Raises RuntimeError in a script's loop that goes on with batches after that.
        """
        self.close()
        own = self._loop = weakref.ref(batches)
        try:
            for batch in batches:
                yield batch
                if self._loop is not own:
                    raise RuntimeError(
                        f"rank {rank}: this loop over the loader cannot go on: within it another "
                        "one has begun, or a state was loaded. Leave it before that, on all ranks; "
                        "to look at a batch, or to evaluate, use a plain DataLoader"
                    )
        finally:
            batches.close()

    def close(self) -> None:
        """End the iteration whose batches are handed out, if any, as a break would."""
        batches = None if self._loop is None else self._loop()
        self._loop = None
        if batches is not None:
            batches.close()

    @contextmanager
    def iterate(self) -> Iterator[tuple[int, int]]:
        """Begin an iteration, as `begin`; note how it ends: with the epoch, or left half-way."""
        place = self.begin()
        iteration = self._iteration
        try:
            yield place
        except BaseException:
            # A generator may end when another has begun, an epoch was set, or a state loaded.
            self._is_left |= iteration is self._iteration
            raise
        if iteration is self._iteration:
            self.finish()

    def begin(self) -> tuple[int, int]:
        """Return epoch and place where an iteration begins; one that was left half-way is over."""
        if self._iteration is not None and self.start:
            self.finish()
        if self._sampler is not None and self._sampler.epoch != self._followed:
            self._followed = self._sampler.epoch
            self.set(self._followed)
        self._iteration, self._is_left = object(), False
        return self.epoch, self.start

    def set(self, epoch: int) -> None:
        """Let the next iteration be of this epoch; all of it, where the last one was left."""
        if epoch != self.epoch or self._is_left:
            self._go_to(epoch, 0)

    def reach(self, start: int) -> None:
        """Note how far the iteration has come, also a left one; nothing once another is set."""
        if self._iteration is not None:
            self.start = start

    def finish(self) -> None:
        """Go on to the next epoch."""
        self._go_to(self.epoch + 1, 0)

    def _go_to(self, epoch: int, start: int) -> None:
        self.epoch, self.start = epoch, start
        self._iteration, self._is_left = None, False

    def state_dict(self, is_of_before: bool = False) -> dict[str, Any]:
        """Return where the next batch lies: in the next epoch, once this one was left half-way.

        is_of_before: the state is that of a time before it was left.
        """
        if self._is_left and self.start and not is_of_before:
            return {"epoch": self.epoch + 1, "start": 0}
        return {"epoch": self.epoch, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader stopped."""
        self._go_to(state["epoch"], state["start"])
        self._followed = self.epoch if self._sampler is None else self._sampler.epoch
