"""The sum of small arrays over the GPUs of one host, by stores into each other's memory.

A kernel of a few microseconds in Pallas' Triton dialect, that CUDA graphs take like any other. Each
device writes its words into a place that every other device has for it, and waits until its own
places have been filled: an empty one holds `EMPTY`, which no word ever is. Whoever has read a word
empties its place again.

Two boxes of places alternate. A device fills a box again only when it has read, from the other box,
what its owner sent after emptying this one: so no word meets another, without a counter or a fence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

BOXES = 2
MAX_WORDS = 64 * 8192 // 2  # of an array: all programs that wait run at once
NUM_WARPS = 8
EMPTY = -1  # two NaNs of bfloat16, for which others are sent
NANS = 0x7FFF7FFF

# To $0 nothing but that it is done; $1 the word, $2 and $3 where the memory begins, $4 the word's
# place in it, $5 whether there is one.
_SEND = """{
    .reg .pred live;
    .reg .b64 at;
    setp.ne.b32 live, $5, 0;
    mov.b64 at, {$2, $3};
    mad.wide.u32 at, $4, 4, at;
    @live st.volatile.global.b32 [at], $1;
    mov.b32 $0, 0;
}"""
# To $0 the word; $1 what has to be done before, $2 to $5 as above.
_RECEIVE = """{
    .reg .pred live, empty;
    .reg .b64 at;
    .reg .b32 word, none;
    mov.b32 word, $1;
    mov.b32 none, 0xFFFFFFFF;
    setp.ne.b32 live, $5, 0;
    mov.b64 at, {$2, $3};
    mad.wide.u32 at, $4, 4, at;
    @!live bra DONE;
AGAIN:
    ld.volatile.global.b32 word, [at];
    setp.eq.b32 empty, word, none;
    @empty bra AGAIN;
    st.volatile.global.b32 [at], none;
DONE:
    mov.b32 $0, word;
}"""


def boxes(num_devices: int) -> jax.Array:
    """What each device has to keep, and the others to know the address of: empty boxes."""
    return jnp.full((BOXES, num_devices, MAX_WORDS), EMPTY, jnp.int32)


def is_supported(x_TD: jax.Array) -> bool:
    """Whether `peer_sum` takes this array."""
    return x_TD.dtype == jnp.bfloat16 and x_TD.size % 2 == 0 and x_TD.size // 2 <= MAX_WORDS


def peer_sum(
    x_TD: jax.Array,
    addresses_N2: jax.Array,
    rank: jax.Array,
    box: int,
    *,
    bias_D: jax.Array | None = None,
    residual_TD: jax.Array | None = None,
) -> jax.Array:
    """residual + bias + the sum of `x_TD` over the devices, in float32, rounded once.

    All devices have to call it in the same order, each time with the other box than before.

    Args:
        x_TD: bfloat16, this device's part of the sum.
        addresses_N2: int32, low and high half of where each device's `boxes` lie.
        rank: int32, which of them this is.
        box: 0 or 1.
        bias_D, residual_TD: bfloat16, added once.
    """
    (T, D), words = x_TD.shape, x_TD.size // 2
    operands = {
        "x": x_TD.reshape(-1),
        "addresses": addresses_N2,
        "rank": rank.reshape(1),
        "bias": bias_D,
        "residual": None if residual_TD is None else residual_TD.reshape(-1),
    }
    names = [name for name, operand in operands.items() if operand is not None]
    return pl.pallas_call(
        partial(_kernel, names=(*names, "out"), box=box, D=D),
        grid=(pl.cdiv(words, 32 * NUM_WARPS),),
        out_shape=jax.ShapeDtypeStruct((T * D,), x_TD.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        name="peer_sum",
    )(*(operands[name] for name in names)).reshape(T, D)


def _kernel(*refs: Any, names: tuple[str, ...], box: int, D: int) -> None:
    ref = dict(zip(names, refs, strict=True))
    N, rank = ref["addresses"].shape[0], ref["rank"][0]
    # A word a thread: words that a thread had to wait for one after the other would take longer,
    # and threads that waited for the same word would find it gone.
    w_W = pl.program_id(0) * 32 * NUM_WARPS + jnp.arange(32 * NUM_WARPS)
    live_W = 2 * w_W < ref["x"].shape[0]

    def halves(name: str, index_W: jax.Array) -> list[jax.Array]:
        """The two numbers of each word."""
        return [
            pltriton.load(ref[name].at[index_W + half], mask=live_W, other=0) for half in (0, 1)
        ]

    def memory(device: jax.Array | int, sender: jax.Array | int) -> list[jax.Array]:
        """Where the words of a sender are put on a device."""
        low_W, high_W = (
            jnp.broadcast_to(ref["addresses"][device, half], w_W.shape) for half in (0, 1)
        )
        return [low_W, high_W, (box * N + sender) * MAX_WORDS + w_W, live_W.astype(jnp.int32)]

    low_W, high_W = (
        lax.bitcast_convert_type(half_W, jnp.int16).astype(jnp.int32)
        for half_W in halves("x", 2 * w_W)
    )
    word_W = (low_W & 0xFFFF) | (high_W << 16)
    word_W = jnp.where(word_W == EMPTY, NANS, word_W)
    sent_W = jnp.zeros_like(word_W)
    for device in range(N):
        sent_W |= _asm(_SEND, word_W, *memory(device, rank))
    added = [halves("bias", lax.rem(2 * w_W, D))] if "bias" in ref else []
    added += [halves("residual", 2 * w_W)] if "residual" in ref else []
    # In the same order everywhere, or the devices would come to differ.
    got = [_asm(_RECEIVE, sent_W, *memory(rank, sender)) for sender in range(N)]
    for half, shift in enumerate((16, 0)):
        total_W = jnp.zeros(w_W.shape, jnp.float32)
        for word_W in got:
            bits_W = (word_W << shift) & -0x10000
            total_W += lax.bitcast_convert_type(bits_W, jnp.float32)
        for term in added:
            total_W += term[half].astype(jnp.float32)
        place_W = ref["out"].at[2 * w_W + half]
        pltriton.store(place_W, total_W.astype(ref["out"].dtype), mask=live_W)


def _asm(code: str, *args_W: jax.Array) -> jax.Array:
    (result_W,) = pltriton.elementwise_inline_asm(
        code,
        args=args_W,
        constraints="=r" + ",r" * len(args_W),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args_W[0].shape, jnp.int32)],
    )
    return result_W
