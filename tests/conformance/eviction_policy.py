"""What every eviction policy must do, whoever it lets go: the suite takes a constructor."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from vllm_pd.kv_offload.policies.base import EvictionPolicy, Key
from vllm_pd.sim.trace import made_key as key

Make = Callable[[int], EvictionPolicy]


def keys(*numbers: int) -> list[Key]:
    return [key(number) for number in numbers]


def hold(policy: EvictionPolicy, *numbers: int) -> None:
    """Store blocks that then may go."""
    for name in keys(*numbers):
        policy.insert(name)
        policy.unpin(name)


class EvictionPolicyConformance:
    """Subclasses give the fixture `make`."""

    def test_what_is_held_is_what_was_inserted_and_has_not_gone(self, make: Make) -> None:
        policy = make(8)
        hold(policy, *range(8))
        assert len(policy) == 8 and all(name in policy for name in keys(*range(8)))
        gone = policy.evict(3)
        assert gone is not None and len(set(gone)) == 3
        assert [name in policy for name in keys(*range(8))] == [name not in gone for name in keys(*range(8))]
        assert len(policy) == 5

    def test_a_pinned_block_never_goes_and_may_go_once_it_is_unpinned(self, make: Make) -> None:
        policy = make(4)
        hold(policy, *range(4))
        policy.pin(key(0))
        policy.pin(key(0))
        policy.pin(key(2))
        assert set(policy.evict(2) or ()) == set(keys(1, 3))
        assert policy.evict(1) is None
        policy.unpin(key(0))
        assert policy.evict(1) == keys(0)
        assert policy.evict(1) is None and len(policy) == 1

    def test_a_block_that_is_being_written_does_not_go(self, make: Make) -> None:
        policy = make(2)
        policy.insert(key(0))
        assert policy.evict(1) is None and key(0) in policy
        policy.unpin(key(0))
        assert policy.evict(1) == keys(0)

    def test_protected_blocks_stay_and_are_no_longer_protected_afterwards(self, make: Make) -> None:
        policy = make(4)
        hold(policy, *range(4))
        assert set(policy.evict(2, keys(0, 1, 9)) or ()) == set(keys(2, 3))
        assert set(policy.evict(2) or ()) == set(keys(0, 1))

    def test_a_refusal_changes_nothing(self, make: Make) -> None:
        one, other = make(16), make(16)
        for policy in (one, other):
            hold(policy, *range(16))
            policy.accessed(keys(*range(8)), set(keys(*range(8))))
            policy.pin(key(3))
        assert one.evict(16) is None
        assert one.evict(13, keys(0, 1, 2)) is None
        assert len(one) == 16
        assert [one.evict(1) for _ in range(15)] == [other.evict(1) for _ in range(15)]

    def test_nothing_to_evict_is_no_refusal(self, make: Make) -> None:
        policy = make(2)
        policy.insert(key(0))
        assert policy.evict(0) == []

    def test_a_block_whose_write_failed_is_forgotten_and_can_come_again(self, make: Make) -> None:
        policy = make(4)
        hold(policy, 1)
        policy.insert(key(0))
        policy.remove(key(0))
        assert key(0) not in policy and len(policy) == 1
        with pytest.raises(KeyError):
            policy.remove(key(0))
        policy.insert(key(0))
        assert policy.evict(2) is None
        policy.unpin(key(0))
        assert set(policy.evict(2) or ()) == set(keys(0, 1))

    def test_clear_forgets_pinned_blocks_and_what_was_learned(self, make: Make) -> None:
        used, fresh = make(8), make(8)
        for start in range(0, 64, 4):
            names = keys(*range(start, start + 4))
            used.missed(names)
            if len(used) > 4:
                used.evict(len(used) - 4)
            hold(used, *range(start, start + 4))
            used.accessed(names, ())
        used.pin(next(name for name in keys(*range(64)) if name in used))
        used.clear()
        assert len(used) == 0 and used.evict(1) is None
        for policy in (used, fresh):
            hold(policy, *range(8))
            policy.accessed(keys(*range(8)), set(keys(2, 3)))
        assert [used.evict(1) for _ in range(8)] == [fresh.evict(1) for _ in range(8)]

    def test_of_one_prompt_the_end_goes_before_the_beginning(self, make: Make) -> None:
        policy = make(8)
        names = keys(*range(8))
        policy.missed(names)
        hold(policy, *range(8))
        policy.accessed(names, ())
        assert [policy.evict(1) for _ in range(8)] == [[name] for name in reversed(names)]

    def test_keys_that_are_not_here_are_ignored(self, make: Make) -> None:
        policy = make(4)
        hold(policy, 0)
        policy.accessed(keys(5, 0, 6), set(keys(5, 0)))
        policy.pin(key(7))
        policy.unpin(key(7))
        assert len(policy) == 1 and policy.evict(1) == keys(0)

    def test_every_block_of_random_traffic_is_accounted_for(self, make: Make) -> None:
        """Against a plain set: loads, stores that fail, blocks in use, refusals, at a full tier."""
        chance = random.Random(7)
        capacity = 64
        policy = make(capacity)
        held: set[Key] = set()
        pinned: set[Key] = set()
        for _ in range(1500):
            start = chance.choice((0, 0, 100, 200, 300, chance.randrange(400, 9000)))
            chain = keys(*range(start, start + chance.randrange(1, 24)))
            reused = {name for name in chain if name in held}
            for name in reused if chance.random() < 0.3 else ():
                policy.pin(name)
                pinned.add(name)
            new = [name for name in chain if name not in held]
            policy.missed(new)
            excess = len(held) + len(new) - capacity
            if excess > 0:
                gone = policy.evict(excess, set(chain))
                free = held - pinned - set(chain)
                assert (gone is None) == (excess > len(free))
                if gone is None:
                    new = []
                else:
                    assert len(gone) == len(set(gone)) == excess and set(gone) <= free
                    held -= set(gone)
            for name in new:
                policy.insert(name)
                if chance.random() < 0.05:
                    policy.remove(name)
                    continue
                held.add(name)
                if chance.random() < 0.9:
                    policy.unpin(name)
                else:
                    pinned.add(name)
            policy.accessed(chain, reused)
            for name in [name for name in pinned if chance.random() < 0.5]:
                policy.unpin(name)
                pinned.discard(name)
            assert len(policy) == len(held)
        assert all(name in policy for name in held)

    def test_memory_of_what_has_gone_is_bounded(self, make: Make) -> None:
        policy = make(32)
        for number in range(1200):
            policy.missed(keys(number))
            if len(policy) == 32:
                policy.evict(1)
            hold(policy, number)
            policy.accessed(keys(number), ())
        assert _entries(policy) <= 32 * 40

    def test_blocks_that_stay_pinned_are_passed_once_and_not_at_each_eviction(self, make: Make) -> None:
        """A slow disk keeps the oldest half of the tier in use: evictions must not search through it each time."""
        policy = make(2000)
        hold(policy, *range(2000))
        for name in keys(*range(1000)):
            policy.pin(name)
        counted = _CountingSet(policy._pinned)  # type: ignore[attr-defined]
        for queue in policy._queues():  # type: ignore[attr-defined]
            queue._pinned = counted
        for number in range(2000, 2500):
            assert policy.evict(1) is not None
            policy.insert(key(number))
            policy.unpin(key(number))
        assert counted.asked < 10_000


class _CountingSet(set[Key]):
    asked = 0

    def __contains__(self, item: object) -> bool:
        self.asked += 1
        return super().__contains__(item)


def _entries(thing: object, seen: set[int] | None = None) -> int:
    """Keys in all containers of an object, those of its parts included; tables of fixed size do not count."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, str | bytes | bytearray | int | float | type):
        return 0
    seen.add(id(thing))
    count = 0
    parts: Iterator[object] = iter(())
    if isinstance(thing, dict):
        count, parts = len(thing), iter(thing.values())
    elif isinstance(thing, list | tuple | set | frozenset):
        count, parts = len(thing), iter(thing)
    slots = itertools.chain.from_iterable(getattr(kind, "__slots__", ()) for kind in type(thing).__mro__)
    fields = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, slot, None) for slot in slots)]
    return count + sum(_entries(part, seen) for part in itertools.chain(parts, fields))
