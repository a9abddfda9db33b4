"""Contexts and arenas: each held by one batch, or shared as evenly as can be."""

from collections import deque
from random import Random

import pytest

from asynctrt.scheduling.contexts import ContextAllocator


def acquire_all(allocator, **kw):
    """Acquire until no context is left."""
    return [allocator.acquire(**kw) for _ in range(allocator.free)]


def test_a_context_is_held_by_one_batch():
    allocator = ContextAllocator(contexts=3, arenas=0)
    assert sorted(acquire_all(allocator)) == [(0, None), (1, None), (2, None)]
    assert allocator.free == 0


def test_the_context_used_last_is_used_next():
    allocator = ContextAllocator(contexts=3, arenas=0)
    taken = [allocator.acquire() for _ in range(2)]
    allocator.release(*taken[0])
    assert allocator.acquire() == taken[0]


def test_arenas_are_shared_evenly():
    allocator = ContextAllocator(contexts=4, arenas=2)
    assert sorted(arena for _, arena in acquire_all(allocator)) == [0, 0, 1, 1]


def test_a_released_arena_is_the_least_used():
    allocator = ContextAllocator(contexts=4, arenas=2)
    context, arena = allocator.acquire()
    allocator.acquire()
    allocator.release(context, arena)
    assert allocator.acquire()[1] == arena


@pytest.mark.parametrize(("contexts", "arenas"), [(1, 1), (4, 1), (5, 2), (5, 3), (4, 4)])
def test_a_context_works_in_one_arena_for_ever(contexts, arenas):
    """What is bound or captured for both stays valid."""
    allocator = ContextAllocator(contexts=contexts, arenas=arenas)
    for _ in range(3):
        taken = acquire_all(allocator)
        assert sorted(context for context, _ in taken) == list(range(contexts))
        assert all(arena == context % arenas for context, arena in taken)
        for context, arena in taken[::2] + taken[1::2]:
            allocator.release(context, arena)
        assert allocator.free == contexts


def test_an_arena_without_a_free_context_is_passed_over():
    allocator = ContextAllocator(contexts=3, arenas=2)
    first, second, third = acquire_all(allocator)
    assert [arena for _, arena in (first, second, third)] == [0, 1, 0]
    allocator.release(*first)
    allocator.release(*third)
    again = [allocator.acquire()[1] for _ in range(2)]
    assert again == [0, 0], "arena 1 is used less, and has no context left"


def test_engines_that_share_arenas_see_each_others_batches():
    users = [0, 0]
    one, other = (ContextAllocator(contexts=2, arenas=2, arena_users=users) for _ in range(2))
    first, second = one.acquire(), other.acquire()
    assert (first[1], second[1]) == (0, 1)
    third, fourth = one.acquire(), other.acquire()
    assert (third[1], fourth[1]) == (1, 0)
    assert users == [2, 2]
    one.release(*third)
    other.release(*second)
    assert users == [2, 0]
    assert one.acquire()[1] == 1


def test_a_batch_goes_to_a_context_that_ran_its_profile():
    allocator = ContextAllocator(contexts=3, arenas=0)
    ran = {}
    for profile in (0, 1, 2):
        taken = allocator.acquire(profile)
        ran[profile] = taken
        allocator.release(*taken)
    assert len(set(ran.values())) == 3, "one that never ran is taken before that of another profile"
    for profile in (1, 0, 2, 2, 0):
        taken = allocator.acquire(profile)
        assert taken == ran[profile]
        allocator.release(*taken)
    assert allocator.free == 3


@pytest.mark.parametrize("arenas", [0, 1, 3])
def test_a_batch_goes_to_a_context_that_last_ran_its_shape(arenas):
    """A change of shapes takes TensorRT as long as the rest of an enqueue, and longer."""
    allocator = ContextAllocator(contexts=3, arenas=arenas)
    ran = {}
    for run in ("a", "b", "c"):
        taken = ran[run] = allocator.acquire(0, run)
        allocator.release(*taken)
    assert len(set(ran.values())) == 3, "one that ran nothing yet comes before one with another shape"
    for run in ("b", "a", "c", "c", "a"):
        taken = allocator.acquire(0, run)
        assert taken == ran[run]
        allocator.release(*taken)
    taken = allocator.acquire(0, "d")
    assert taken == ran["b"], "the shape that was not run for the longest time is given up"
    allocator.release(*taken)
    assert allocator.acquire(0, "b") != ran["b"], "what it ran before does not count"


def test_a_context_of_another_shape_comes_before_one_of_another_profile():
    allocator = ContextAllocator(contexts=2, arenas=0)
    first, other = allocator.acquire(0, "a"), allocator.acquire(1, "a")
    allocator.release(*first)
    allocator.release(*other)
    assert allocator.acquire(0, "b") == first


@pytest.mark.parametrize("arenas", [0, 3])
def test_batches_that_change_no_context_keep_to_one(arenas):
    allocator = ContextAllocator(contexts=3, arenas=arenas)
    taken = []
    for _ in range(5):
        taken.append(allocator.acquire(0))
        allocator.release(*taken[-1])
    assert len(set(taken)) == 1


def test_a_profile_without_a_context_of_its_own_takes_any_and_keeps_it():
    allocator = ContextAllocator(contexts=2, arenas=0)
    for profile in (0, 1):
        allocator.release(*allocator.acquire(profile))
    taken, other = allocator.acquire(2), allocator.acquire(0)
    assert {taken, other} == {(0, None), (1, None)}
    for each in (taken, other):
        allocator.release(*each)
    assert allocator.acquire(2) == taken


def test_the_least_used_arena_comes_before_the_profile():
    allocator = ContextAllocator(contexts=4, arenas=2)
    assert [allocator.acquire(0)[1] for _ in range(2)] == [0, 1]


def test_a_context_of_the_same_profile_comes_first_in_whichever_arena():
    allocator = ContextAllocator(contexts=4, arenas=4)
    ran = {profile: allocator.acquire(profile) for profile in (0, 1, 2)}
    for taken in ran.values():
        allocator.release(*taken)
    for profile in (2, 0, 1, 0):
        taken = allocator.acquire(profile)
        assert taken == ran[profile]
        allocator.release(*taken)


def test_without_arenas_none_is_held():
    assert ContextAllocator(contexts=2, arenas=0).acquire()[1] is None


def test_a_quarantined_context_is_never_used_again():
    allocator = ContextAllocator(contexts=2, arenas=0)
    hung = allocator.acquire()
    allocator.quarantine(*hung)
    other = allocator.acquire()
    assert other != hung
    assert allocator.usable == 1
    allocator.quarantine(*other)
    assert (allocator.free, allocator.usable) == (0, 0)
    assert allocator.quarantined == {0, 1}


def test_with_a_context_its_whole_arena_is_quarantined():
    """A batch there would wait for the one that never ends."""
    allocator = ContextAllocator(contexts=5, arenas=2)
    hung, other, mate = (allocator.acquire() for _ in range(3))
    assert [arena for _, arena in (hung, other, mate)] == [0, 1, 0]
    allocator.quarantine(*hung)
    assert allocator.quarantined == {0, 2, 4}
    assert allocator.usable == 2
    assert [arena for _, arena in acquire_all(allocator)] == [1]
    allocator.release(*mate)
    assert allocator.free == 0, "a mate that ended all the same is not free again"
    allocator.release(*other)
    assert allocator.acquire() == other


def test_the_mates_of_a_quarantined_context_may_hang_too():
    users = [0]
    allocator = ContextAllocator(contexts=3, arenas=1, arena_users=users)
    for taken in acquire_all(allocator)[:2]:
        allocator.quarantine(*taken)
        assert allocator.usable == 0
    assert users == [1]
    assert repr(allocator) == "<ContextAllocator free=0 quarantined=3>"


@pytest.mark.parametrize("arenas", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_contexts_come_to_keep_their_profiles(arenas, seed):
    """Two batches in flight, of either of two profiles: there are two contexts for each in the end."""
    allocator = ContextAllocator(contexts=4, arenas=arenas)
    ran, in_flight, switches = {}, deque(), 0
    random = Random(seed)
    for number in range(400):
        if len(in_flight) == 2:
            allocator.release(*in_flight.popleft())
        profile = random.randrange(2)
        taken = allocator.acquire(profile)
        in_flight.append(taken)
        if number >= 100:
            switches += ran[taken[0]] != profile
        ran[taken[0]] = profile
    assert switches == 0


def test_a_profile_that_is_new_takes_the_context_used_least_recently():
    allocator = ContextAllocator(contexts=2, arenas=2)
    for profile in (0, 1):
        allocator.release(*allocator.acquire(profile))
    allocator.release(*allocator.acquire(0))
    assert allocator.acquire(2) == (1, 1)
