"""What all states share."""

from __future__ import annotations

import pytest

from gtopk.errors import HostsUpdatedInterrupt
from gtopk.runtime.world import world
from gtopk.torch.elastic import ObjectState, State


def test_a_state_says_what_a_subclass_must_do():
    for method in ("save", "restore", "sync"):
        with pytest.raises(NotImplementedError, match=rf"State must define {method}\(\)"):
            getattr(State(), method)()


def test_horovods_arguments_are_taken(ranks):
    def program(rank):
        state = ObjectState(lambda obj: {**obj, "value": "broadcast"}, lambda: 7, value=rank)
        state.sync()
        assert state.value == "broadcast"
        assert state._rank() == 7

    ranks(2, program)


@pytest.mark.parametrize("went_back", [False, True])
def test_after_a_restore_all_ranks_count_from_rank_0s_commit(ranks, went_back):
    """One may have been a commit ahead; steps of ranks that did not go back are their own."""

    def program(rank):
        here = world.current()
        here.resume(6 - 3 * rank)
        state = ObjectState(value=1)
        if went_back:
            state.restore()
            state._go_back()
        state.sync()
        return here.step

    assert ranks(2, program) == [6, 6 if went_back else 3]


def test_a_state_with_a_save_of_its_own_goes_back_to_its_commit(ranks):
    class Own(ObjectState):
        def save(self):
            self.saved = self.value

        def restore(self):
            self.value = self.saved

    def program(rank):
        state = Own(value=1)
        world.current().resume(4)
        state.commit()
        world.current().resume(9)
        state.restore()
        state._go_back()
        return world.current().step

    assert ranks(2, program) == [4, 4]


def test_objects_changed_in_place_are_restored_too(ranks):
    def program(rank):
        state = ObjectState(values=[1, [2]])
        state.values[1].append(3)
        state.restore()
        assert state.values == [1, [2]]
        state.values[1].append(4)
        state.restore()
        assert state.values == [1, [2]]

    ranks(1, program)


@pytest.mark.parametrize(
    ("updates", "skip_sync"), [([1], True), ([2], False), ([3], False), ([1, 2], False)]
)
def test_word_on_any_rank_interrupts_all_at_the_same_commit(ranks, updates, skip_sync):
    def program(rank):
        state = ObjectState(value=1)
        state.commit()
        if rank == 2:
            for number, update in enumerate(updates):
                state.on_hosts_updated(10 + number, update)
        state.value = 2
        with pytest.raises(HostsUpdatedInterrupt) as interrupt:
            state.commit()
        assert interrupt.value.skip_sync is skip_sync
        state.value = 3
        state.restore()
        assert state.value == 2  # it was saved before
        state.commit()

    ranks(3, program)


def test_a_reset_forgets_word_of_what_it_answers(ranks):
    def program(rank):
        state = ObjectState()
        state.on_hosts_updated(1, 2)
        state.on_reset()
        state.commit()

    ranks(1, program)
