"""XXH3 (64 bits, with a seed) of whole pages, for numba: one pass that can copy what it reads on the way.

The algorithm is that of github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md for inputs over 240 bytes. Its inner
loop is written as vector instructions of LLVM, since numba makes none of the loop in Python: 20 GB/s a core of what is
in the cache. What is copied is stored past the cache ("nontemporal"): an ordinary store first reads the line that it
is about to overwrite, and the line is not needed here again; both together are more than twice as fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRIPE_BYTES = 64
STREAM_ALIGN = 32
"""Where a copy may begin."""

_AHEAD_BYTES = 1024
"""What is asked of memory before it is needed, and marked as not needed again: less of what Python needs is displaced.
Beyond the end it asks for bytes of something else, which is no access."""
_TO_READ, _ONCE, _DATA = 0, 0, 1
"""Arguments of LLVM's prefetch."""

SECRET_WORDS = 24
LANES = 8
SECRET: NDArray[np.uint64] = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    "<u8",
).astype(np.uint64)

_BLOCK_STRIPES = 16
PIECE_BYTES = STRIPE_BYTES * _BLOCK_STRIPES
"""What all pieces but the last are multiples of, when a hash is computed piece by piece."""

_LAST_SECRET = 192 - STRIPE_BYTES - 7
_MERGE_SECRET = 11
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_AVALANCHE = 0x165667919E3779F9


@dataclass(frozen=True, slots=True)
class Functions:
    """For use in functions that numba compiles: a hash of what comes in one piece or several, and the end of a copy.

    `source` is the address of a piece. Unless `target` is 0 it is copied there too; that is a multiple of
    `STREAM_ALIGN`. `secret` and `lanes` are room for `SECRET_WORDS` and `LANES` words: the state between the calls.

    Attributes:
        begin: `(seed, secret, lanes)`.
        add: `(source, target, size, secret, lanes)`: a piece that is not the last, a multiple of `PIECE_BYTES`.
        end: `(source, target, size, whole, secret, lanes)`: the last piece, which is not empty; returns the hash.
            `whole` is the size of all pieces, a multiple of `STRIPE_BYTES` over 240.
        fence: `()`: what was copied before it is there for other threads that are told after it.
    """

    begin: Callable[..., Any]
    add: Callable[..., Any]
    end: Callable[..., Any]
    fence: Callable[..., Any]


def build() -> Functions:
    """Compiled with whatever they are used in."""
    numba = importlib.import_module("numba")
    add_stripes, fence = _intrinsics()
    # With signed numbers each access would ask whether the index counts from the end.
    u64: Any = np.uint64
    p32_1, p32_2, p32_3 = u64(_P32_1), u64(_P32_2), u64(_P32_3)
    p1, p2, p3, p4, p5 = (u64(prime) for prime in _P64)
    avalanche, low_half = u64(_AVALANCHE), u64(0xFFFFFFFF)
    stripe, block, stripes = u64(STRIPE_BYTES), u64(PIECE_BYTES), u64(_BLOCK_STRIPES)
    last_secret, merge_secret, scramble_word = u64(_LAST_SECRET), _MERGE_SECRET, SECRET_WORDS - LANES
    default = SECRET

    @numba.njit
    def folded(a, b):  # type: ignore[no-untyped-def]
        """Both halves of the product of 128 bits, one xor the other."""
        low, cross_a = (a & low_half) * (b & low_half), (a >> u64(32)) * (b & low_half)
        cross_b, high = (a & low_half) * (b >> u64(32)), (a >> u64(32)) * (b >> u64(32))
        middle = (low >> u64(32)) + (cross_a & low_half) + cross_b
        upper = (cross_a >> u64(32)) + (middle >> u64(32)) + high
        return upper ^ ((middle << u64(32)) | (low & low_half))

    @numba.njit
    def word_at(secret, byte):  # type: ignore[no-untyped-def]
        """The 64 bits that begin at a byte which begins no word."""
        word, bits = byte // 8, u64(8 * (byte % 8))
        return (secret[word] >> bits) | (secret[word + 1] << (u64(64) - bits))

    @numba.njit
    def begin(seed, secret, lanes):  # type: ignore[no-untyped-def]
        for i in range(0, 24, 2):
            secret[i] = default[i] + seed
            secret[i + 1] = default[i + 1] - seed
        lanes[0], lanes[1], lanes[2], lanes[3] = p32_3, p1, p2, p3
        lanes[4], lanes[5], lanes[6], lanes[7] = p4, p32_2, p5, p32_1

    @numba.njit
    def add(source, target, size, secret, lanes):  # type: ignore[no-untyped-def]
        at_lanes, at_secret, done = u64(lanes.ctypes.data), u64(secret.ctypes.data), u64(0)
        while done < size:
            add_stripes(source, target, done, stripes, at_lanes, at_secret)
            for i in range(8):
                lane = lanes[i]
                lanes[i] = (lane ^ (lane >> u64(47)) ^ secret[scramble_word + i]) * p32_1
            done += block

    @numba.njit
    def end(source, target, size, whole, secret, lanes):  # type: ignore[no-untyped-def]
        at_lanes, at_secret = u64(lanes.ctypes.data), u64(secret.ctypes.data)
        # What is scrambled is followed by more, so the last of the blocks is not, though it may be a whole one.
        done = (size - u64(1)) // block * block
        add(source, target, done, secret, lanes)
        rest = (size - u64(1) - done) // stripe
        add_stripes(source, target, done, rest, at_lanes, at_secret)
        add_stripes(source, target, size - stripe, u64(1), at_lanes, at_secret + last_secret)
        h = whole * p1
        for i in range(4):
            at = merge_secret + 16 * i
            h += folded(lanes[2 * i] ^ word_at(secret, at), lanes[2 * i + 1] ^ word_at(secret, at + 8))
        h = (h ^ (h >> u64(37))) * avalanche
        return h ^ (h >> u64(32))

    return Functions(begin, add, end, fence)


def _intrinsics() -> tuple[Any, Any]:
    """What numba has no words for, as instructions of LLVM."""
    ir = importlib.import_module("llvmlite.ir")
    types = importlib.import_module("numba").types
    intrinsic = importlib.import_module("numba.extending").intrinsic
    word, index = ir.IntType(64), ir.IntType(32)
    vector = ir.VectorType(word, 4)
    byte = ir.IntType(8).as_pointer()
    half = 32  # bytes of a vector: half a stripe

    def every_lane(value: int) -> Any:
        return ir.Constant(vector, [ir.Constant(word, value)] * 4)

    def at(builder: Any, base: Any, offset: int) -> Any:
        return builder.inttoptr(builder.add(base, ir.Constant(word, offset)), vector.as_pointer())

    def added(builder: Any, lanes: Any, data: Any, secret: Any) -> Any:
        keyed = builder.xor(data, secret)
        product = builder.mul(builder.and_(keyed, every_lane(0xFFFFFFFF)), builder.lshr(keyed, every_lane(32)))
        order = ir.Constant(ir.VectorType(index, 4), [ir.Constant(index, i) for i in (1, 0, 3, 2)])
        return builder.add(lanes, builder.add(builder.shuffle_vector(data, data, order), product))

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        source, target, offset, count, lanes, secret = arguments
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, index, index, index])
        )
        copies = builder.icmp_unsigned("!=", target, ir.Constant(word, 0))
        first = [builder.load(at(builder, lanes, i), align=8) for i in (0, half)]
        entry = builder.block
        test, body, store, onward, end = (
            builder.append_basic_block(name) for name in ("test", "body", "store", "onward", "end")
        )
        builder.branch(test)

        builder.position_at_end(test)
        number = builder.phi(word)
        sums = [builder.phi(vector), builder.phi(vector)]
        builder.cbranch(builder.icmp_unsigned("<", number, count), body, end)

        builder.position_at_end(body)
        here = builder.add(offset, builder.mul(number, ir.Constant(word, STRIPE_BYTES)))
        key = builder.add(secret, builder.mul(number, ir.Constant(word, 8)))
        soon = builder.inttoptr(builder.add(builder.add(source, here), ir.Constant(word, _AHEAD_BYTES)), byte)
        builder.call(prefetch, [soon, *(ir.Constant(index, hint) for hint in (_TO_READ, _ONCE, _DATA))])
        data = [builder.load(at(builder, builder.add(source, here), i), align=1) for i in (0, half)]
        keys = [builder.load(at(builder, key, i), align=1) for i in (0, half)]
        after = [added(builder, *each) for each in zip(sums, data, keys, strict=True)]
        builder.cbranch(copies, store, onward)

        builder.position_at_end(store)
        past_the_cache = builder.module.add_metadata([ir.Constant(index, 1)])
        for i, value in zip((0, half), data, strict=True):
            instruction = builder.store(value, at(builder, builder.add(target, here), i), align=STREAM_ALIGN)
            instruction.set_metadata("nontemporal", past_the_cache)
        builder.branch(onward)

        builder.position_at_end(onward)
        following = builder.add(number, ir.Constant(word, 1))
        builder.branch(test)
        number.add_incoming(ir.Constant(word, 0), entry)
        number.add_incoming(following, onward)
        for phi, start, value in zip(sums, first, after, strict=True):
            phi.add_incoming(start, entry)
            phi.add_incoming(value, onward)

        builder.position_at_end(end)
        for i, value in zip((0, half), sums, strict=True):
            builder.store(value, at(builder, lanes, i), align=8)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def add_stripes(_context, source, target, offset, count, lanes, secret):  # type: ignore[no-untyped-def]
        """`count` stripes of source and target, from `offset` on, with a secret that moves on by a word each."""
        return types.void(*[types.uint64] * 6), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def fence(_context):  # type: ignore[no-untyped-def]
        def generate_fence(context: Any, builder: Any, _: Any, __: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), generate_fence

    return add_stripes, fence
