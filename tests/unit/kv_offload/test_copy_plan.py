"""Copy plans, against a slow model that follows the words of vLLM's contract one block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.kv_offload.copy_plan import CopyPlan, Ref, Side, TensorPair, TierLayout, plan_load, plan_store

BLOCKS, CHUNKS = 16, 12


@dataclass(frozen=True)
class Case:
    layout: TierLayout
    blocks: list[int]
    chunks: list[int]
    group_sizes: list[int]
    block_indices: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    per_chunk = draw(st.integers(1, 4))
    pairs = []
    base = 1 << 20
    for _ in range(draw(st.integers(1, 3))):
        page = draw(st.integers(1, 9))
        block_gap, chunk_gap = draw(st.integers(0, 5)), draw(st.integers(0, 5))
        pairs.append(
            TensorPair(
                Side(base, page + block_gap, BLOCKS),
                Side(base + (1 << 16), page * per_chunk + chunk_gap, CHUNKS),
                page,
            )
        )
        base += 1 << 18
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        tensors = draw(st.lists(st.integers(0, len(pairs) - 1), unique=True, max_size=3))
        groups.append(tuple(Ref(t, draw(st.integers(1, pairs[t].page_bytes))) for t in tensors))
    sizes, indices, blocks, chunks = [], [], [], []
    for _ in groups:
        size, index = draw(st.integers(0, 7)), draw(st.integers(0, 9))
        needed = -(-(size + index % per_chunk) // per_chunk) if size else 0
        blocks += draw(st.lists(st.integers(0, BLOCKS - 1), min_size=size, max_size=size, unique=True))
        chunks += draw(st.lists(st.integers(0, CHUNKS - 1), min_size=needed, max_size=needed, unique=True))
        sizes.append(size)
        indices.append(index)
    return Case(TierLayout(tuple(pairs), tuple(groups), per_chunk), blocks, chunks, sizes, indices)


def expected_store(case: Case) -> dict[tuple[int, int], int]:
    """(source byte, destination byte) -> how often it is copied."""
    moved: dict[tuple[int, int], int] = {}
    blocks, chunks = iter(case.blocks), list(case.chunks)
    for refs, size, index in zip(case.layout.groups, case.group_sizes, case.block_indices, strict=True):
        place = index % case.layout.blocks_per_chunk
        for _ in range(size):
            block = next(blocks)
            for ref in refs:
                pair = case.layout.pairs[ref.tensor]
                for byte in range(ref.used_bytes):
                    src = pair.blocks.base + block * pair.blocks.stride + byte
                    dst = pair.chunks.base + chunks[0] * pair.chunks.stride + place * pair.page_bytes + byte
                    moved[src, dst] = moved.get((src, dst), 0) + 1
            place += 1
            if place == case.layout.blocks_per_chunk:
                place = 0
                chunks.pop(0)
        if place and size:
            chunks.pop(0)
    return moved


def bytes_of(plan: CopyPlan) -> dict[tuple[int, int], int]:
    moved: dict[tuple[int, int], int] = {}
    for src, dst, size in zip(plan.src.tolist(), plan.dst.tolist(), plan.size.tolist(), strict=True):
        for byte in range(size):
            moved[src + byte, dst + byte] = moved.get((src + byte, dst + byte), 0) + 1
    return moved


def ids(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_store_plan_moves_exactly_the_bytes_of_the_contract(case: Case) -> None:
    plan = plan_store(case.layout, ids(case.blocks), ids(case.chunks), case.group_sizes, case.block_indices)
    expected = expected_store(case)
    assert bytes_of(plan) == expected
    assert plan.total_bytes == sum(expected.values())


@settings(max_examples=100, deadline=None)
@given(cases())
def test_load_plan_is_the_store_plan_backwards(case: Case) -> None:
    args = (case.layout, ids(case.blocks), ids(case.chunks), case.group_sizes, case.block_indices)
    backwards = {(dst, src): n for (src, dst), n in bytes_of(plan_store(*args)).items()}
    assert bytes_of(plan_load(*args)) == backwards


def simple_layout(per_chunk: int = 1) -> TierLayout:
    pair = TensorPair(Side(1000, 8, BLOCKS), Side(9000, 8 * per_chunk, CHUNKS), 8)
    return TierLayout((pair,), ((Ref(0, 8),),), per_chunk)


def test_neighbours_on_both_sides_become_one_copy() -> None:
    plan = plan_store(simple_layout(), ids([3, 4, 5, 9]), ids([0, 1, 2, 3]), [4], [0])
    assert list(zip(plan.src.tolist(), plan.dst.tolist(), plan.size.tolist(), strict=True)) == [
        (1024, 9000, 24),
        (1072, 9024, 8),
    ]


def test_blocks_in_descending_order_are_joined_as_well() -> None:
    plan = plan_store(simple_layout(), ids([5, 4, 3]), ids([2, 1, 0]), [3], [0])
    assert plan.size.tolist() == [24]


def test_padding_of_a_page_is_not_copied() -> None:
    pair = TensorPair(Side(0, 8, BLOCKS), Side(4096, 8, CHUNKS), 8)
    plan = plan_store(TierLayout((pair,), ((Ref(0, 5),),), 1), ids([0, 1]), ids([0, 1]), [2], [0])
    assert plan.size.tolist() == [5, 5]


def test_a_job_without_blocks_is_an_empty_plan() -> None:
    plan = plan_load(simple_layout(), ids([]), ids([]), [0], [0])
    assert plan.total_bytes == 0
    assert len(plan.size) == 0


@pytest.mark.parametrize(
    ("blocks", "chunks", "sizes", "indices", "message"),
    [
        ([BLOCKS], [0], [1], [0], "names block 16"),
        ([-1], [0], [1], [0], "names block -1"),
        ([0], [CHUNKS], [1], [0], "names chunk 12"),
        ([0, 1], [0], [1], [0], "cover 1"),
        ([0], [0, 1], [1], [0], "cover 1"),
        ([0], [0], [2], [0], "fewer than its groups need"),
        ([0, 1, 2], [0], [3], [1], "fewer than its groups need"),
        ([0], [0], [1, 0], [0, 0], "2 groups"),
    ],
)
def test_a_job_that_does_not_fit_is_refused(
    blocks: list[int], chunks: list[int], sizes: list[int], indices: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_store(simple_layout(per_chunk=2), ids(blocks), ids(chunks), sizes, indices)


def test_a_layout_whose_rows_cannot_hold_its_pages_is_refused() -> None:
    pair = TensorPair(Side(0, 8, BLOCKS), Side(0, 8, CHUNKS), 8)
    with pytest.raises(ValueError, match="cannot hold"):
        TierLayout((pair,), ((Ref(0, 8),),), 2)
    with pytest.raises(ValueError, match="uses 9 bytes"):
        TierLayout((pair,), ((Ref(0, 9),),), 1)
    with pytest.raises(ValueError, match="tensor 1"):
        TierLayout((pair,), ((Ref(1, 8),),), 1)
