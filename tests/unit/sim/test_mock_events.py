"""KV events of mock workers are those that vLLM would send for the same changes."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from vllm_pd.agent.block_truth import BlockTruth
from vllm_pd.agent.kv_events import decode
from vllm_pd.agent.zmq_reader import ZmqReader
from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.sim.mock_events import BlockContent, BlockEvents, BlockStored, EventPublisher
from vllm_pd.state.block_index import Tier

DEADLINE_S = 10.0
GPU, CPU, SSD = int(Tier.GPU), int(Tier.CPU), int(Tier.SSD)


def block(number: int) -> bytes:
    return number.to_bytes(32, "little")


def described(*chain: int, events: BlockEvents | None = None) -> BlockEvents:
    events = events or BlockEvents(2)
    parent = None
    for number in chain:
        events.describe(block(number), BlockContent(parent, (number, number + 1), None))
        parent = block(number)
    return events


def test_a_chain_is_one_event_with_its_parent_and_all_tokens() -> None:
    events = described(1, 2, 3)
    events.events({block(1): GPU})
    (stored,) = events.events({block(3): GPU, block(2): GPU})
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == ([block(2), block(3)], block(1))
    assert (stored.token_ids, stored.block_size, stored.medium) == ([2, 3, 3, 4], 2, "GPU")


def test_branches_are_events_of_their_own() -> None:
    events = described(1, 2, 3, events=described(1, 5))
    stored = events.events({block(number): GPU for number in (1, 2, 3, 5)})
    # Which branch goes on with the first block is open.
    assert sorted(len(event.block_hashes) for event in stored) in ([1, 3], [2, 2])
    assert {name for event in stored for name in event.block_hashes} == {block(n) for n in (1, 2, 3, 5)}


def test_only_what_changed_on_a_tier_is_said() -> None:
    events = described(1, 2)
    events.events({block(1): GPU | CPU, block(2): GPU | CPU})
    (removed,) = events.events({block(1): CPU, block(2): GPU | CPU})
    assert (removed.block_hashes, removed.medium) == ([block(1)], "GPU")
    assert events.count(Tier.GPU) == 1 and events.count(Tier.CPU) == 2


def test_blocks_are_known_for_as_long_as_a_request_may_store_them() -> None:
    both = [block(1), block(2)]
    events = described(1, 2, events=described(1, 2))
    events.forget(both)
    # One of two requests with this prompt has ended; the other may store the blocks, lose them, and store them anew.
    for _ in range(2):
        (stored,) = events.events({block(1): GPU, block(2): GPU})
        assert isinstance(stored, BlockStored)
        assert stored.block_hashes == both
        events.events({block(1): 0, block(2): 0})
    events.forget(both)
    with pytest.raises(KeyError):
        events.events({block(1): GPU})


async def test_whoever_asks_for_all_messages_again_knows_the_tiers() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = EventPublisher(context)
    truth = BlockTruth()
    try:
        events = described(*range(1, 9))
        for changed in (dict.fromkeys(range(1, 9), GPU | CPU | SSD), {1: SSD, 2: CPU | SSD, 3: 0}):
            publisher.publish(events.events({block(number): bits for number, bits in changed.items()}))
        socket = context.socket(zmq.DEALER)
        socket.connect(publisher.endpoints.replay)
        socket.send_multipart((b"", (0).to_bytes(8)))
        with ZmqReader(socket) as replay:
            while (message := await replay.receive(DEADLINE_S)) is not None and message[3]:
                batch = decode(message[3])
                assert not batch.unreadable
                truth.apply(batch.events)
    finally:
        publisher.close()
        context.destroy(linger=0)
    held = {key: bits for bits, packed in truth.held().items() for key in _keys(packed)}
    expected = dict.fromkeys(range(4, 9), GPU | CPU | SSD) | {1: SSD, 2: CPU | SSD}
    assert held == {block(number)[:KEY_BYTES]: bits for number, bits in expected.items()}


@pytest.mark.vllm
def test_vllm_itself_reads_the_messages() -> None:
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    events = described(1, 2)
    encoder = msgspec.msgpack.Encoder()
    stored = events.events({block(1): GPU | CPU, block(2): GPU})
    removed = events.events({block(1): CPU})
    payload = encoder.encode((1.0, stored + removed, 0))
    batch = msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch)
    gpu, cpu, gone = batch.events
    assert (gpu.block_hashes, gpu.token_ids, gpu.block_size, gpu.medium) == (
        [block(1), block(2)],
        [1, 2, 2, 3],
        2,
        "GPU",
    )
    assert (cpu.block_hashes, cpu.medium) == ([block(1)], "CPU")
    assert isinstance(gone, kv_events.BlockRemoved) and gone.medium == "GPU"


def _keys(packed: bytes) -> list[bytes]:
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
