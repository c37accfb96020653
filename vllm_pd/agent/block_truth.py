"""What one engine's KV cache holds, learned from its events. Pure.

Tiers. GPU and CPU tiers announce every copy they make of a block, and every copy they drop: two requests that compute
the same prefix at the same time leave two copies on the GPU, and the block is gone when both are. Copies are counted
there. The storage tier is a set of files: stored twice is stored once. A reset of the prefix cache concerns the GPU
alone; that the CPU tier was emptied is said by a removal without hashes, which `connectors/event_flush.py` adds, since
vLLM says nothing then.

Groups. A hybrid model keeps several KV caches (groups), and vLLM reuses a prefix as far as every one of them allows: a
full-attention group must hold each block of it, a sliding-window or recurrent one only what lies just before its end.
A block therefore counts as held when all groups that need every block hold it. The windowed groups are left out: they
keep what the end of an earlier request needs, which is where the next turn of a conversation goes on, and there the
prediction is right to the block. A prompt that leaves an earlier one in the middle may find less than is claimed. A
model without any full-attention group counts blocks that all its groups hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_pd.agent.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from vllm_pd.block_hash import KEY_BYTES, BlockKey
from vllm_pd.state.block_index import Packed, Tier

# Plain integers, here and below: operations on enum flags would cost as much as all the rest.
_GPU, _CPU, _SSD = int(Tier.GPU), int(Tier.CPU), int(Tier.SSD)
# Whether files are on this host or elsewhere makes no difference: this engine can load them.
_TIERS: Mapping[str | None, int] = {"GPU": _GPU, "CPU": _CPU, "STORAGE": _SSD, None: _GPU}
_WINDOWED = frozenset({"sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba"})
_NEVER = -1
"""No mask of slots has all these bits."""
_NOT_SHARED = frozenset({"encoder_only_attention", "cross_attention"})


@dataclass(frozen=True, slots=True)
class Changes:
    """What a batch of events changed.

    Attributes:
        blocks: key -> tier bits that hold now (0: gone), for blocks whose bits changed.
        everything: so much changed that the whole truth is to be announced anew; `blocks` is then empty.
    """

    blocks: Mapping[BlockKey, int]
    everything: bool = False


class BlockTruth:
    """One engine's cache. Its memory is bounded by what the engine holds."""

    def __init__(self) -> None:
        # Each (tier, group) is a bit; a block's mask says in which of them it has a copy.
        self._masks: dict[BlockKey, int] = {}
        # Copies beyond the first are rare, so they are kept apart.
        self._further: dict[tuple[int, BlockKey], int] = {}
        self._slots: dict[tuple[int, int], int] = {}
        self._kinds: dict[int, str] = {}
        self._bits = _TierBits({})
        self._blocks_with: dict[int, int] = defaultdict(int)
        self.ignored = 0
        """Events that could not be used: integer or short hashes, an unknown medium."""

    def __len__(self) -> int:
        """Blocks with a copy anywhere."""
        return len(self._masks)

    def count(self, tier: Tier) -> int:
        """Blocks held on this tier."""
        return sum(blocks for bits, blocks in self._blocks_with.items() if bits & tier)

    def apply(self, events: Iterable[Event]) -> Changes:
        """Take the events of one batch, in order."""
        before: dict[BlockKey, int] = {}
        everything = False
        for event in events:
            if isinstance(event, AllBlocksCleared):
                everything |= self._empty(_GPU, before)
                continue
            tier, keys = _TIERS.get(event.medium), _keys(event.block_hashes)
            if tier is None or keys is None:
                self.ignored += 1
            elif isinstance(event, BlockRemoved):
                if keys:
                    self._remove(event, tier, keys, before)
                else:
                    everything |= self._empty(tier, before)
            else:
                everything |= self._store(event, tier, keys, before)
        changed = self._settle(before)
        return Changes({}, True) if everything else Changes(changed)

    def forget(self) -> Changes:
        """The engine may hold anything now: claim nothing, and learn from the events that follow.

        A removal of a block that is not known is harmless, so from here on everything claimed is true again.
        """
        self._masks.clear()
        self._further.clear()
        self._blocks_with.clear()
        return Changes({}, True)

    def held(self) -> dict[int, Packed]:
        """Everything that is held: tier bits (never 0) -> packed keys."""
        lists: defaultdict[int, list[BlockKey]] = defaultdict(list)
        bits_of = self._bits
        for key, mask in self._masks.items():
            lists[bits_of[mask]].append(key)
        return {bits: b"".join(keys) for bits, keys in lists.items() if bits}

    def _store(self, event: BlockStored, tier: int, keys: list[BlockKey], before: dict[BlockKey, int]) -> bool:
        kind = event.kv_cache_spec_kind
        if kind in _NOT_SHARED:
            return False
        group = event.group_idx or 0
        slot = self._slots.get((tier, group), 0)
        everything = False
        if not slot or (kind is not None and self._kinds.get(group) != kind):
            slot, everything = self._learn(tier, group, kind, before)
        masks, further, counted = self._masks, self._further, tier != _SSD
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & slot:
                before.setdefault(key, mask)
                masks[key] = mask | slot
            elif counted:
                further[slot, key] = further.get((slot, key), 0) + 1
        return everything

    def _remove(self, event: BlockRemoved, tier: int, keys: list[BlockKey], before: dict[BlockKey, int]) -> None:
        slot = self._slots.get((tier, event.group_idx or 0), 0)
        masks, further = self._masks, self._further
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & slot:
                continue
            if further and (copies := further.pop((slot, key), 0)):
                if copies > 1:
                    further[slot, key] = copies - 1
                continue
            before.setdefault(key, mask)
            if mask == slot:
                del masks[key]
            else:
                masks[key] = mask & ~slot

    def _empty(self, tier: int, before: dict[BlockKey, int]) -> bool:
        """Drop a tier; return whether that changed more blocks than are left, so that announcing anew is cheaper."""
        slots = sum(slot for (of, _), slot in self._slots.items() if of == tier)
        touched = [(key, mask) for key, mask in self._masks.items() if mask & slots]
        for key, mask in touched:
            before.setdefault(key, mask)
            if left := mask & ~slots:
                self._masks[key] = left
            else:
                del self._masks[key]
        if self._further:
            self._further = {k: copies for k, copies in self._further.items() if not k[0] & slots}
        return len(touched) > len(self._masks)

    def _settle(self, before: Mapping[BlockKey, int]) -> dict[BlockKey, int]:
        """The blocks whose tier bits are others than before this batch; keeps the counts."""
        changed: dict[BlockKey, int] = {}
        now, bits_of = self._masks.get, self._bits
        moves: defaultdict[int, int] = defaultdict(int)
        for key, mask in before.items():
            old, new = bits_of[mask], bits_of[now(key, 0)]
            if old != new:
                changed[key] = new
                moves[old << 3 | new] += 1
        for move, blocks in moves.items():
            self._blocks_with[move >> 3] -= blocks
            self._blocks_with[move & 7] += blocks
        return changed

    def _learn(self, tier: int, group: int, kind: str | None, before: dict[BlockKey, int]) -> tuple[int, bool]:
        """A group that was not seen on this tier yet, or whose kind has become known; it may change what counts."""
        slot = self._slots.setdefault((tier, group), 1 << len(self._slots))
        if kind is not None:
            self._kinds[group] = kind
        needed: dict[int, int] = {}
        windowed = {g for g, kind in self._kinds.items() if kind in _WINDOWED}
        if windowed >= {g for _, g in self._slots}:
            windowed = set()
        for of in {of for of, _ in self._slots}:
            # Where only windowed groups have shown up, nothing is held yet.
            needed[of] = sum(s for (t, g), s in self._slots.items() if t == of and g not in windowed) or _NEVER
        was, self._bits = self._bits, _TierBits(needed)
        if all(needed[of] == mask for of, mask in was.needed.items()):
            return slot, False
        # Seldom, and only in the first moments: the bits of every block may be others now.
        everything = bool(self._masks or before)
        before.clear()
        self._blocks_with.clear()
        for mask in self._masks.values():
            self._blocks_with[self._bits[mask]] += 1
        return slot, everything


class _TierBits(dict[int, int]):
    """Mask of (tier, group) -> tier bits.

    Args:
        needed: tier bit -> what a mask must have for it.
    """

    def __init__(self, needed: Mapping[int, int]) -> None:
        self.needed = needed

    def __missing__(self, mask: int) -> int:
        bits = self[mask] = sum(tier for tier, needed in self.needed.items() if mask & needed == needed)
        return bits


def _keys(hashes: list[bytes | int]) -> list[BlockKey] | None:
    """The keys of block hashes; None when the hashes are integers or too short."""
    if len(hashes) == 1:
        # vLLM says of each evicted block by itself that it is gone.
        block_hash = hashes[0]
        return [block_hash[:KEY_BYTES]] if isinstance(block_hash, bytes) and len(block_hash) >= KEY_BYTES else None
    try:
        keys: list[BlockKey] = [block_hash[:KEY_BYTES] for block_hash in hashes]  # type: ignore[index]
    except TypeError:
        return None
    # None is longer than that, so this is the length only if all have it.
    return keys if len(b"".join(keys)) == KEY_BYTES * len(keys) else None
