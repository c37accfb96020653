"""Merging neighbours: everything is moved once, to the same place, in fewer requests."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.kv_offload.block_io.base import OpenFile, Piece
from vllm_pd.kv_offload.block_io.merge import merge

FILES = [OpenFile(Path(name), -1, alignment=1, direct=False) for name in "ab"]
PIECES = st.lists(
    st.builds(
        Piece,
        st.sampled_from(FILES),
        st.integers(0, 12).map(lambda unit: unit * 10),
        st.integers(0, 12).map(lambda unit: 1000 + unit * 10),
        st.sampled_from([10, 20]),
    ),
    max_size=20,
)


@given(pieces=PIECES, most_bytes=st.integers(1, 100), most_ranges=st.integers(1, 4))
def test_requests_move_exactly_the_pieces(pieces: list[Piece], most_bytes: int, most_ranges: int) -> None:
    requests = merge(pieces, most_bytes=most_bytes, most_ranges=most_ranges)
    moved = []
    for request in requests:
        assert len(request.memory) <= most_ranges
        assert request.length <= most_bytes or len(request.pieces) == 1
        assert sum(length for _, length in request.memory) == request.length
        addresses = [address + byte for address, length in request.memory for byte in range(length)]
        moved += [(request.file, request.offset + at, address) for at, address in enumerate(addresses)]
    wanted = [(p.file, p.offset + byte, p.address + byte) for p in pieces for byte in range(p.length)]
    assert sorted(moved, key=str) == sorted(wanted, key=str)
    assert sorted(index for request in requests for index in request.pieces) == list(range(len(pieces)))


def test_neighbours_in_file_and_memory_are_one_request() -> None:
    pieces = [Piece(FILES[0], unit * 10, 1000 + unit * 10, 10) for unit in (3, 1, 2, 0)]
    [request] = merge(pieces, most_bytes=100, most_ranges=1)
    assert (request.offset, request.length, request.memory) == (0, 40, [(1000, 40)])
    assert request.pieces == [3, 1, 2, 0]


def test_neighbours_in_the_file_alone_are_one_request_of_several_ranges_where_these_are_allowed() -> None:
    pieces = [Piece(FILES[0], unit * 10, 1000 + unit * 50, 10) for unit in range(3)]
    assert len(merge(pieces, most_bytes=100, most_ranges=1)) == 3
    [request] = merge(pieces, most_bytes=100, most_ranges=8)
    assert request.memory == [(1000, 10), (1050, 10), (1100, 10)]


def test_files_are_never_mixed() -> None:
    pieces = [Piece(FILES[unit % 2], unit * 10, 1000 + unit * 10, 10) for unit in range(4)]
    assert len(merge(pieces, most_bytes=100, most_ranges=8)) == 4
