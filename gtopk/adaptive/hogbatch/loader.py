"""HogbatchLoader: a worker's batches of an epoch, and an optimizer that steps the shared model.

    request      size from everybody's update counts; the epoch's next samples are this worker's
    hand-over    fast classes: its own copy becomes what the shared model is
    script       forward, backward
    step         in place (slow classes), or on the copy, and what it changed is added (fast)

No worker waits for another until an epoch is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import Sampler

from ...parameters import KNOWN_TO_ADAPT, require_known
from ..epochs import Epochs
from ..learning_rate import LearningRate
from ..memory import Memory
from ..next_world import require_its_world
from ..options import Job
from ..own_steps import OwnSteps
from ..sources import order_of, rebuilt
from ..stepping import take_over
from .board import now_nanoseconds
from .check import check
from .device_classes import NAMES, class_of
from .evaluation import evaluates, mean_loss
from .node import join_node
from .options import HogbatchOptions
from .periods import Periods
from .probe import memory_of
from .report import Report, report_of
from .shared_model import SharedModel, layout_of, states_of
from .sizes import Sizer, Thresholds, checked
from .writer import Writer

EVALUATED: int = 4096  # samples of a batch whose loss is evaluated


class Claims(Sampler[list[int]]):
    """The indices of a worker's batches, from wherever they come at the time."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterator[list[int]]] = lambda: iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.source()


def fetch(dataset: Any, samples: Sequence[int]) -> Any:
    """Return samples as a DataLoader does, before it collates them."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(samples))
    return [dataset[sample] for sample in samples]


class HogbatchLoader:
    """An iterable of this worker's batches, with one step for each.

    A period is a step of the run's record: the batches that this worker has begun in a quarter of a
    second, one at least, or until its epoch ends, whose end it waits for. Nothing is exchanged in
    it, and no byte sent, but by the first worker of each of several nodes, which merges them.

    num_samples: of the batch in hand.
    """

    def __init__(self, job: Job[HogbatchOptions], adapts: bool = False) -> None:
        options, world, optimizer = job.options, job.world, job.optimizer
        self._mode = "adaptive-hogbatch" if adapts else "hogbatch"
        check(job, self._mode)
        self._options, self._world, self._optimizer = options, world, optimizer
        self.dataset = job.loader.dataset
        length = len(self.dataset)  # type: ignore[arg-type]
        self._order = job.order or order_of(job.loader, length, options.seed)
        self._epochs = Epochs(job.loader)
        self._claims = Claims()
        self._loader = rebuilt(job.loader, batch_sampler=self._claims)
        self._claimed: deque[Sequence[int]] = deque()  # and not handed out yet

        names = optimizer._parameter_names
        trained = [parameter for parameter in names if parameter.requires_grad]
        self._class = class_of(trained, options.device_class)
        states = states_of(optimizer, trained)
        layout = layout_of(trained, [names[p] for p in trained], states)
        self._steps = OwnSteps(world, optimizer, "period")
        self._node = join_node(job, self._mode, self._class, layout, trained, states, self._steps)
        self._board, self._ledger = self._node.board, self._node.ledger
        self._periods = Periods(self._steps, self._board, world)
        self._writer = Writer(
            SharedModel(self._node.model_bytes, layout),
            self._board,
            trained,
            states,
            optimizer,
            copies=self._class.is_fast,
            audits=options.audit,
        )
        self._trained = trained
        self._device = trained[0].device

        most = min(job.loader.batch_size or 1, options.max_batch or 1 << 40)
        default = checked(Thresholds(options.min_batch, most), "this rank")
        said = options.thresholds().get(self._class.name)
        self._sizer = Sizer(self._class.is_fast, adapts, options.alpha, said, default)
        self._memory = Memory(world.rank, trained)
        self._rate = LearningRate(optimizer, options.lr_scaling, options.global_batch)
        self._board["kind"] = NAMES.index(self._class.name)
        self._board["size"] = self._sizer.size
        world.engine.ranks_may_leave |= options.ranks_may_leave
        self._wrapped_step = take_over(optimizer, self._mode, self._step)
        self._in_epoch = False
        self._in_hand: Sequence[int] = ()
        self._began = 0
        self.num_samples = 0
        self._ledger.end()

    # ---- an epoch

    def __len__(self) -> int:
        """Return about how many batches of this worker's present size an epoch has."""
        return -(-len(self._order(0)) // self._sizer.size)

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches; the epoch is over when every sample was in one of some."""
        self._writer.check()
        require_known(self._optimizer.param_groups, set(self._trained), KNOWN_TO_ADAPT)
        epoch, _ = self._epochs.begin()
        order = self._order(epoch)
        self._begin(len(order))
        self._in_epoch = True
        begun = now_nanoseconds()
        try:
            yield from self._pass(lambda: self._request(order))
            while again := self._reclaim():
                yield from self._pass(lambda again=again: self._note(order, again))  # type: ignore[misc]
            with self._steps.spent.waiting():
                self._node.merging.end()
        except GeneratorExit:  # the script has broken it off
            self._give_back()
            with self._steps.spent.waiting():
                self._node.merging.end(self._ledger)
            raise
        finally:
            self._give_back()
            self._board.add("there", now_nanoseconds() - begun)
            self._ledger.end()
            self._epochs.finish()
            self._periods.end()
            self._in_epoch = False

    def sit_out(self) -> None:
        """Take no part in an epoch; it begins and ends for this worker, too."""
        self._epochs.begin()
        self._begin(len(self._order(self._epochs.epoch)))
        with self._steps.spent.waiting():
            self._node.merging.end(self._ledger)
        self._ledger.end()
        self._epochs.finish()
        self._periods.end()

    def _begin(self, length: int) -> None:
        require_its_world(self._world, self._mode, "go on in another job, by a checkpoint")
        if length > self._node.longest:
            raise ValueError(
                f"rank {self._world.rank}: an epoch of mode {self._mode!r} has at most the "
                f"{self._node.longest} samples of the data set, got an order of {length}"
            )
        self._steps.spent.begin()
        with self._steps.spent.waiting():
            self._ledger.begin(length)
        self._node.merging.begin()
        self._periods.begin()

    def _reclaim(self) -> list[int]:
        with self._steps.spent.waiting():
            return self._ledger.reclaim(self._sizer.size)

    def _give_back(self) -> None:
        """Let others have what this worker has claimed and not stepped with."""
        for places in (self._in_hand, *self._claimed):
            self._ledger.give_back(places)
        self._in_hand = ()
        self._claimed.clear()

    def _request(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of one batch after another, as long as there is anything to claim."""
        while True:
            if self._options.lock_step:
                with self._steps.spent.waiting():
                    self._ledger.take_turn()
            claim = self._ledger.claim(self._next_size())
            yield from self._note(order, claim)
            if not claim:
                break
        if self._options.lock_step:
            self._ledger.pass_turn()

    def _note(self, order: Sequence[int], places: Sequence[int]) -> Iterator[list[int]]:
        if places:
            self._claimed.append(places)
            yield [order[place] for place in places]

    def _next_size(self) -> int:
        board = self._board
        counts = self._node.weighted_updates(self._options.beta)
        size = self._sizer.next(counts[board.me], [counts[place] for place in board.others()])
        board["size"] = size
        if self._sizer.thresholds is not None:
            board["smallest"], board["largest"] = self._sizer.thresholds
        return size

    def _pass(self, source: Callable[[], Iterator[list[int]]]) -> Iterator[Any]:
        """Yield the batches of a source of indices, each to be stepped with."""
        self._claims.source = source
        for batch in self._loader:
            self._periods.poll()
            self._in_hand = self._claimed.popleft()
            self.num_samples = len(self._in_hand)
            self._writer.hand_over()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            self._began = now_nanoseconds()
            yield batch
            if self._in_hand:
                self._board.add("unused", 1)
                self._let_go()

    # ---- a step

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the shared model with the gradients of the batch in hand."""
        if not self._in_hand:
            raise RuntimeError(
                f"rank {self._world.rank}: optimizer.step() without a batch in hand; mode "
                f"{self._mode!r} takes one step for each batch of its loader"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        samples = len(self._in_hand)
        self._rate.scale(samples, None)
        if self._options.loss_reduction == "sum":
            for parameter in self._trained:
                if parameter.grad is not None:
                    parameter.grad.div_(samples)
        if self._gradients_are_finite():
            self._writer.update(self._apply)
            self._board.add("samples", samples)
        else:
            self._board.add("skipped", 1)
        self._let_go()
        self._node.merging.poll()
        return loss

    def _gradients_are_finite(self) -> bool:
        flags = [
            # No sum in 16 bits: of finite elements it would not be finite.
            each.sum(dtype=torch.promote_types(each.dtype, torch.float32)).isfinite()
            for p in self._trained
            if (each := p.grad) is not None
        ]
        return not flags or bool(torch.stack(flags).all())

    def _apply(self) -> None:
        with self._optimizer.skip_synchronize():
            self._wrapped_step()

    def _let_go(self) -> None:
        """Be done with the batch in hand."""
        spent = now_nanoseconds() - self._began
        self._board.add("busy", spent)
        size = len(self._in_hand)
        self._ledger.finish(self._in_hand)
        self._in_hand = ()
        if self._device.type == "cuda":
            self._sizer.note_memory(size, *memory_of(self._device))
        if self._memory.most is not None:
            self._sizer.limit(self._memory.most)
        self._sizer.note(size, spent / 1e9)
        if self._options.lock_step:
            self._ledger.pass_turn()

    def backward(self, loss_of: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
        """Compute a batch's loss and gradients, in parts where the memory is too small.

        In place of `loss_of(batch).backward()`. This worker's sizes are bounded then.
        """
        summed = self._options.loss_reduction == "sum"
        return self._memory.backward(loss_of, batch, max(self.num_samples, 1), summed)

    # ---- between epochs

    @torch.no_grad()
    def evaluate(
        self, loss_of: Callable[[Any], torch.Tensor], dataset: Any = None, batch: int = EVALUATED
    ) -> float:
        """Return the mean loss of all samples at the shared model; all workers call it together.

        The fast classes compute it, in large batches; where there are none, all do.
        loss_of: from a batch to the mean loss of its samples.
        Raises RuntimeError within an epoch, at once.
        """
        self._require_between_epochs("evaluate")
        data: Any = self.dataset if dataset is None else dataset

        def loss(samples: range) -> float:
            return float(loss_of(self._loader.collate_fn(fetch(data, samples))))

        idles = not evaluates(self._node)
        with self._steps.spent.waiting() if idles else nullcontext():
            return mean_loss(self._node, len(data), batch, self._writer.refresh, loss)

    def report(self) -> Report:
        """Return what the workers of this node have done so far."""
        return report_of(self._board, self._node.ranks)

    def audited(self) -> float:
        """Return the share of all steps, in L1, that the race has lost; all workers call it.

        Needs audit=True, and no step under way: between epochs.
        """
        return self._writer.audited(self._world)

    @property
    def last_staleness(self) -> int:
        """Return how many updates of others came while the last batch was computed."""
        return self._writer.last_staleness

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next iteration as this epoch; otherwise epochs count on by themselves."""
        self._epochs.set(epoch)

    def drain(self) -> None:
        """Have this rank's parameters be the shared model's, and that the same on all nodes.

        All ranks call it together, between epochs. Raises RuntimeError within one, at once.
        """
        self._require_between_epochs("drain")
        with self._steps.spent.waiting():
            self._ledger.begin(0, between_nodes=False)
            self._node.merging.drain()
        self._writer.refresh()
        self._ledger.end()

    def _require_between_epochs(self, what: str) -> None:
        if self._in_epoch:
            raise RuntimeError(
                f"rank {self._world.rank}: loader.{what}() within an epoch of mode {self._mode!r}, "
                "which no worker waits for another in: call it (and gtopk.save_checkpoint, which "
                "drains) on all ranks between epochs"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what the next epoch hangs on."""
        return {
            "mode": self._mode,
            "class": self._class.name,
            "epochs": self._epochs.state_dict(),
            "size": self._sizer.size,
            "thresholds": self._sizer.thresholds and list(self._sizer.thresholds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the epoch after the one another loader finished.

        Sizes that its worker found are those of a worker of this class, where none are said.
        """
        if state["mode"] != self._mode:
            raise ValueError(
                f"this loader's mode is {self._mode!r}, the state's {state['mode']!r}; make the "
                "loader with the mode it was saved with"
            )
        self._epochs.load_state_dict(state["epochs"])
        if state["thresholds"] is not None and state.get("class") == self._class.name:
            self._sizer.resume(state["thresholds"][0], state["size"])
