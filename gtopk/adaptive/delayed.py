"""Mode "abs": a loader of micro-batches, and an optimizer whose steps are rounds (see `rounds`)."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, Final

import torch

from collectives.transports import Transport

from ..engine import Engine, Operation
from .dealing import deal, left_over, speeds_after
from .epochs import Epochs
from .learning_rate import LearningRate
from .options import Job, RoundOptions
from .round_exchange import RoundExchange
from .rounds import Ready, Reduced, Rounds
from .sources import Numbers, order_of, rebuilt

SAFE_MOMENTUM: Final = 0.5
_COUNT_BITS: Final = 31
_COUNTS: Final = (1 << _COUNT_BITS) - 1


class EngineWire:
    """The ranks' rounds as operations of the engine."""

    def __init__(
        self, name: str, exchange: RoundExchange, facts: Sequence[str], engine: Engine
    ) -> None:
        self.exchange = exchange
        self._name = name
        self._facts = [exchange.facts, *facts]
        self._engine = engine

    def ready(self, samples: int, is_last: bool) -> Operation:
        """Say that this rank may end the round."""

        def work(transport: Transport, votes: list[int]) -> Ready:
            return Ready(sum(vote >> 1 for vote in votes), any(vote & 1 for vote in votes))

        return self._engine.submit(f"{self._name}.ready", [], work, vote=samples << 1 | is_last)

    def reduce(self, sums: list[torch.Tensor | None], samples: int, batches: int) -> Operation:
        """Reduce the sums of a round to their mean."""
        finite = self.exchange.take(sums)

        def work(transport: Transport, votes: list[int]) -> Reduced:
            counts = [vote >> 1 & _COUNTS for vote in votes]
            done = [vote >> 1 + _COUNT_BITS for vote in votes]
            update = None
            if all(vote & 1 for vote in votes) and any(counts):
                update = self.exchange.reduce(transport, 1.0 / sum(counts))
            return Reduced(update, counts, done)

        return self._engine.submit(
            f"{self._name}.gradients",
            self._facts,
            work,
            vote=finite | samples << 1 | batches << 1 + _COUNT_BITS,
        )


class DelayedLoader:
    """An iterable of this rank's micro-batches, as many a round as it has time for.

    The script stays as it is, a `step` for every batch; most steps only add up. What the last
    rounds of an iteration computed is applied before the iteration ends.
    """

    def __init__(self, job: Job[RoundOptions]) -> None:
        options, world, optimizer = job.options, job.world, job.optimizer
        self._options, self._world, self._optimizer = options, world, optimizer
        check(job)
        length = len(job.loader.dataset)  # type: ignore[arg-type]
        self._order = job.order or order_of(job.loader, length, options.seed)
        self.dataset = job.loader.dataset
        self._mine: list[list[int]] = []  # indices of this pass's micro-batches
        self._loader = rebuilt(job.loader, batch_sampler=self._mine)
        self._numbers = Numbers(job.loader, self._loader, world.rank)
        self._epochs = Epochs(job.loader)
        self._rate = LearningRate(optimizer, options.lr_scaling, options.global_batch)
        self._speeds = [1] * world.size
        name = f"adapt.{next(world.sets[0].unnamed)}"
        facts = ["mode='abs'", f"{length} samples", *options.facts()]
        world.engine.submit(name, facts, lambda transport, votes: None).wait()
        names = optimizer._parameter_names
        trained = [parameter for parameter in names if parameter.requires_grad]
        parameter_facts = [f"parameter '{names[p]}' {list(p.shape)} {p.dtype}" for p in trained]
        self.exchange = RoundExchange(trained, optimizer._compression)
        self.rounds = Rounds(
            trained,
            EngineWire(name, self.exchange, parameter_facts, world.engine),
            world.rank,
            world.size,
            options.global_batch,
            self._apply,
        )
        optimizer._reducer.overlaps = False  # rounds are exchanged, not backward passes
        self._wrapped_step = optimizer.step

        def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        # Bound to the optimizer: a learning-rate scheduler made later wraps it once more.
        optimizer.step = MethodType(step, optimizer)
        self.num_samples = 0

    def _apply(self, samples: int) -> None:
        """Step with the update that is in the gradients."""
        self._rate.scale(samples, None)
        with self._optimizer.skip_synchronize():
            self._wrapped_step()

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the micro-batch's gradients into the round; steps where a round has ended."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.rounds.add(self.num_samples, self._options.loss_reduction == "sum")
        self._optimizer.zero_grad()  # the optimizer counts backward passes between its own steps
        self.rounds.poll()
        return loss

    def __len__(self) -> int:
        """Return the micro-batches of an epoch, of all ranks."""
        return -(-len(self._order(0)) // self._options.micro_batch)

    def __iter__(self) -> Iterator[Any]:
        """Yield micro-batches until every sample was in one, on one rank."""
        epoch, start = self._epochs.begin()
        self._numbers.begin(epoch)
        order = list(self._order(epoch))[start:]
        size = self._options.micro_batch
        left = [order[first : first + size] for first in range(0, len(order), size)]
        while left:
            dealt = deal(len(left), self._speeds)
            self._mine[:] = [left[place] for place in dealt[self._world.rank]]
            yield from self._pass()
            done = self.rounds.batches
            left = [left[place] for place in left_over(dealt, done)]
            self._speeds = speeds_after(done, self._speeds)
        self._epochs.finish()

    def _pass(self) -> Iterator[Any]:
        """Yield what was dealt to this rank, until one rank has none left."""
        self.rounds.begin()
        sizes = deque(map(len, self._mine))
        for batch in self._loader if self._mine else ():
            self.num_samples = sizes.popleft()
            yield batch
            if self.rounds.ended:
                break
        while not self.rounds.ended:
            self.rounds.poll(is_last=True)
            if not self.rounds.ended and self.rounds.waits_for is not None:
                self.rounds.waits_for.wait()
        self.rounds.drain()

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next iteration as this epoch; otherwise epochs count on by themselves."""
        self._epochs.set(epoch)

    def drain(self) -> None:
        """Do nothing: what is under way is applied before an iteration ends."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the next epoch hangs on, this rank's residual included.

        Raises RuntimeError in the middle of an epoch.
        """
        if not self.rounds.is_drained:
            raise RuntimeError(
                "gradients are under way, which a checkpoint would lose; take it after the epoch"
            )
        return {
            "mode": "abs",
            "epochs": self._epochs.state_dict(),
            "speeds": self._speeds,
            "residual": self.exchange.residual,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the epoch after the one another loader finished.

        Speeds are those of as many ranks: others begin with equal ones. The residual is this
        rank's: on another number of ranks, its share of their sum.
        """
        if state["mode"] != "abs":
            raise ValueError(
                f"this loader's mode is 'abs', the state's {state['mode']!r}; make the loader "
                "with the mode it was saved with"
            )
        self._epochs.load_state_dict(state["epochs"])
        if len(state["speeds"]) == self._world.size:
            self._speeds = list(state["speeds"])
        if state["residual"] is not None:
            self.exchange.residual = state["residual"]


def check(job: Job[RoundOptions]) -> None:
    """Raise ValueError for what rounds cannot do; warn of a momentum that is unstable with them."""
    if job.optimizer.backward_passes_per_step != 1:
        raise ValueError(
            "mode 'abs' adds up micro-batches itself: use backward_passes_per_step=1, got "
            f"{job.optimizer.backward_passes_per_step}"
        )
    asked = job.optimizer._options
    for name, value in (
        ("local_clip_norm", asked.local_clip_norm),
        ("global_clip_norm", asked.global_clip_norm),
        ("scaler", job.optimizer.scaler),
    ):
        if value is not None:
            raise ValueError(f"mode 'abs' applies rounds as they are: it takes no {name}")
    if job.options.lr_scaling == "adascale":
        raise ValueError("mode 'abs' measures no noise: use lr_scaling 'none', 'linear' or 'sqrt'")
    if not hasattr(job.loader.dataset, "__len__"):
        raise ValueError(
            "mode 'abs' deals the samples of an epoch: it needs a data set of a length"
        )
    momentum = max(float(group.get("momentum", 0.0)) for group in job.optimizer.param_groups)
    if momentum > SAFE_MOMENTUM:
        warnings.warn(
            f"mode 'abs' applies gradients one round late: with momentum {momentum:g} the learning "
            f"rate must stay below {1 - momentum:.2g}/L, where synchronous steps allow "
            f"{2 * (1 + momentum):.2g}/L (L: the largest curvature). Use a momentum up to "
            f"{SAFE_MOMENTUM:g}, or a smaller learning rate",
            stacklevel=4,
        )
