"""The sum of small arrays over the GPUs of one host, by stores into each other's memory.

A kernel of a few microseconds in Pallas' Triton dialect, that CUDA graphs take like any other. Each
device writes its words into a place that every other device has for it, and waits until its own
places have been filled: an empty one holds `EMPTY`, which no word ever is. Whoever has read a word
empties its place again.

No two sums in a row use the same box of places. So a device fills a box again only when it has
read, from another one, what its owner sent after emptying this: no word meets another, without a
counter or a fence.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.elementwise import elementwise
from pallas_kernels.product_parts import call_by_name, result_shapes
from pallas_kernels.rms_norm import Rows

BOXES = 3
NUM_WARPS = 4
BLOCK = 32 * NUM_WARPS  # words that a program sends at once, one a thread
MAX_PROGRAMS = 1536  # which wait for others' words: all run at once, 16 on a multiprocessor
MAX_BLOCKS = 4  # of a program
EMPTY = -1  # two NaNs of bfloat16, for which others are sent
NANS = 0x7FFF7FFF

# Puts word $1 into place $4 of the memory that begins at $2 and $3. What comes out, 0, goes into
# what has to follow: the dialect takes such code for a function of its arguments.
_SEND = """{
    .reg .b64 at;
    mov.b64 at, {$2, $3};
    mad.wide.u32 at, $4, 4, at;
    st.volatile.global.b32 [at], $1;
    mov.b32 $0, 0;
}"""
# Waits for the word in such a place, after $1, and empties it.
_RECEIVE = """{
    .reg .pred empty;
    .reg .b64 at;
    .reg .b32 word, none;
    mov.b32 none, $1;
    mov.b32 none, 0xFFFFFFFF;
    mov.b64 at, {$2, $3};
    mad.wide.u32 at, $4, 4, at;
AGAIN:
    ld.volatile.global.b32 word, [at];
    setp.eq.b32 empty, word, none;
    @empty bra AGAIN;
    st.volatile.global.b32 [at], none;
    mov.b32 $0, word;
}"""


def max_words(num_devices: int) -> int:
    """Of an array: each device sends all of them to every other one."""
    return MAX_PROGRAMS * MAX_BLOCKS * BLOCK * 2 // max(num_devices, 2)


def boxes(num_devices: int) -> jax.Array:
    """Empty boxes: [devices, boxes of each, devices that send, words]."""
    shape = (num_devices, BOXES, num_devices, max_words(num_devices))
    return jnp.full(shape, EMPTY, jnp.int32)


class Peers(NamedTuple):
    """What `peer_sum` needs to know of the devices.

    Attributes:
        addresses_N2: int32, low and high half of where each device's `boxes` lie.
        box: below `BOXES`.
    """

    addresses_N2: jax.Array
    box: int


def is_supported(x_TD: jax.Array, num_devices: int) -> bool:
    """Whether `peer_sum` takes this array."""
    words, D = x_TD.size // 2, x_TD.shape[1]
    return (
        x_TD.dtype == jnp.bfloat16
        and words <= max_words(num_devices)
        and D % (2 * BLOCK) == 0
        and words // BLOCK % _blocks_of_program(words) == 0
    )


def _blocks_of_program(words: int) -> int:
    """As few as there may be."""
    return pl.next_power_of_2(pl.cdiv(words, MAX_PROGRAMS * BLOCK))


def peer_sum(
    x_TD: jax.Array,
    peers: Peers,
    rank: jax.Array,
    *,
    bias_D: jax.Array | None = None,
    residual_TD: jax.Array | None = None,
    next_scale_D: jax.Array | None = None,
    interpret: bool = False,
) -> Rows:
    """residual + bias + the sum of `x_TD` over the devices, in float32, rounded once.

    All devices have to call it in the same order, each time with another box than before.

    Args:
        x_TD: bfloat16, this device's part of the sum; D is a multiple of 256.
        rank: int32, which of the devices this is.
        bias_D, residual_TD: bfloat16, added once.
        next_scale_D: factors of the norm of the result, to begin it here.
        interpret: run on any platform, as if every device had the same part.

    Returns:
        [T, D] in bfloat16, and the first half of its norm.
    """
    T, D = x_TD.shape
    row_blocks = D // (2 * BLOCK)
    operands = {
        "x": x_TD,
        "addresses": peers.addresses_N2,
        "rank": rank.reshape(1),
        "bias": bias_D,
        "residual": residual_TD,
        "next_scale": next_scale_D,
    }
    begins_norm = next_scale_D is not None
    return call_by_name(
        partial(_kernel, box=peers.box, on_card=not interpret),
        operands,
        result_shapes((T, D), x_TD.dtype, blocks=row_blocks, begins_norm=begins_norm),
        name="peer_sum",
        programs=T * row_blocks // _blocks_of_program(x_TD.size // 2),
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
    )


def _kernel(*refs: Any, names: tuple[str, ...], box: int, on_card: bool) -> None:
    ref = dict(zip(names, refs, strict=True))
    N, rank = ref["addresses"].shape[0], ref["rank"][0]
    (T, D), programs = ref["x"].shape, pl.num_programs(0)
    row_blocks = D // (2 * BLOCK)
    # A block has a word a thread: threads that waited for the same one would find it gone.
    w_W = jnp.arange(BLOCK)

    def place(device: jax.Array | int, sender: jax.Array | int, block: jax.Array) -> list[Any]:
        """Where the words of a sender are put on a device."""
        address = [jnp.broadcast_to(ref["addresses"][device, half], w_W.shape) for half in (0, 1)]
        return [*address, (box * N + sender) * max_words(N) + block * BLOCK + w_W]

    def halves(name: str, block: jax.Array) -> list[jax.Array]:
        """The two numbers of each word."""
        d_W = 2 * (lax.rem(block, row_blocks) * BLOCK + w_W)
        row = () if ref[name].ndim == 1 else (lax.div(block, row_blocks),)
        return [ref[name][*row, d_W + half] for half in (0, 1)]

    sent_W = jnp.zeros(w_W.shape, jnp.int32)
    blocks = [pl.program_id(0) + step * programs for step in range(_blocks_of_program(T * D // 2))]
    words = []
    for block in blocks:
        low_W, high_W = (
            lax.bitcast_convert_type(half_W, jnp.int16).astype(jnp.int32)
            for half_W in halves("x", block)
        )
        word_W = (low_W & 0xFFFF) | (high_W << 16)
        word_W = jnp.where(word_W == EMPTY, NANS, word_W)
        for device in range(N if on_card else 0):
            sent_W |= _asm(_SEND, word_W, *place(device, rank, block))
        words.append(word_W)
    for block, word_W in zip(blocks, words, strict=True):
        added = [halves(name, block) for name in ("bias", "residual") if name in ref]
        scales = halves("next_scale", block) if "next_scale" in ref else []
        # In the same order everywhere, or the devices would come to differ.
        got = [word_W] * N
        if on_card:
            got = [_asm(_RECEIVE, sent_W, *place(rank, sender, block)) for sender in range(N)]
        square_W = jnp.zeros(w_W.shape, jnp.float32)
        t, part = lax.div(block, row_blocks), lax.rem(block, row_blocks)
        d_W = 2 * (part * BLOCK + w_W)
        for half, shift in enumerate((16, 0)):
            y_W = jnp.zeros(w_W.shape, jnp.float32)
            for bits_W in got:
                y_W += lax.bitcast_convert_type((bits_W << shift) & -0x10000, jnp.float32)
            for term in added:
                y_W += term[half].astype(jnp.float32)
            y_W = y_W.astype(ref["out"].dtype)
            ref["out"][t, d_W + half] = y_W
            if scales:
                ref["next"][t, d_W + half] = y_W * scales[half]
                square_W += jnp.square(y_W.astype(jnp.float32))
        if scales:
            ref["next_square"][part, t] = square_W.sum()


def _asm(code: str, *args_W: jax.Array) -> jax.Array:
    return elementwise(code, "=r" + ",r" * len(args_W), *args_W, dtype=jnp.int32)
