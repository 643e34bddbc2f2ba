"""The closed set of executables of an engine, by key."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp

from jaxpaged.core.buckets import Bucket, Buckets
from jaxpaged.models.decoder import Decoder, Params, head_params
from jaxpaged.runtime.batch_builder import TABLE_UPDATES
from jaxpaged.runtime.compilation import Program, abstract
from jaxpaged.runtime.pooling import embeddings
from jaxpaged.runtime.sampler import VARIANTS, PenaltyState, count_tokens
from jaxpaged.runtime.slot_table import SCORING
from jaxpaged.runtime.step import (
    EngineState,
    StepShapes,
    forward,
    rides_along,
    sample,
    take_input,
    update_page_tables,
)

PENALTY_PIECE = 2048  # token ids that one call adds to a slot's counts


@dataclass(frozen=True)
class Forward:
    """Computes one bucket of tokens."""

    bucket: Bucket


@dataclass(frozen=True)
class Sample:
    """Turns hidden rows into tokens."""

    num_rows: int
    variant: str


@dataclass(frozen=True)
class Embed:
    """Turns hidden rows into embeddings."""

    num_rows: int


@dataclass(frozen=True)
class TakeInput:
    """Copies so many words from the host into the state."""

    size: int


class Upkeep(Enum):
    """Changes of state beside the steps."""

    PAGE_TABLES = "page tables"
    PENALTIES = "penalties"


Key = Forward | Sample | Embed | TakeInput | Upkeep


def all_keys(buckets: Buckets, input_sizes: Sequence[int]) -> list[Key]:
    """Every executable that a step may need, the largest first: they compile longest."""
    keys: list[Key] = [Forward(bucket) for bucket in reversed(buckets.forward)]
    for variant in VARIANTS:
        sizes = buckets.scoring_rows if variant in SCORING else buckets.rows
        keys += [Sample(num_rows, variant) for num_rows in sizes]
    return [*keys, *map(Embed, buckets.rows), *map(TakeInput, input_sizes), *Upkeep]


def largest_keys(buckets: Buckets) -> list[Key]:
    """The executables that may need the most scratch memory."""
    return [Forward(buckets.forward[-1]), Sample(buckets.scoring_rows[-1], "full")]


def smallest_keys(buckets: Buckets) -> list[Key]:
    """One cheap step."""
    return [Forward(buckets.forward[0]), Sample(buckets.rows[0], "greedy")]


@dataclass(frozen=True)
class Programs:
    """Knows the function and the argument shapes behind each key."""

    model: Decoder
    shapes: StepShapes
    max_logprobs: int
    params: Params
    state: EngineState
    penalties: PenaltyState

    def __call__(self, key: Key) -> Program:
        state = abstract(self.state)
        # The small arrays of the state are whole on every device, and so is all that is sampled.
        whole = self.state.last_token.sharding
        match key:
            case Forward(bucket):
                return Program(
                    functools.partial(forward, self.model, self.shapes, bucket),
                    (abstract(self.params), state),
                    donate=(1,),
                    out_shardings=jax.tree.map(lambda array: array.sharding, self.state),
                )
            case Sample(num_rows, variant):
                return Program(
                    functools.partial(
                        sample, self.model, self.shapes, num_rows, variant, self.max_logprobs
                    ),
                    (
                        abstract(head_params(self.params)),
                        state.hidden_RD,
                        state.position_R,
                        state.last_token,
                        abstract(self.penalties) if variant == "full" else None,
                        state.input_X
                        if rides_along(variant)
                        else _words(self.shapes.sample_packing(num_rows, variant).size),
                    ),
                    donate=(3, 4),
                    out_shardings=whole,
                )
            case Embed(num_rows):
                return Program(
                    functools.partial(embeddings, num_rows),
                    (state.hidden_RD if state.pooled_RD is None else state.pooled_RD,),
                    donate=(),
                    out_shardings=whole,
                )
            case TakeInput(size):
                return Program(
                    take_input, (state.input_X, _words(size)), donate=(0,), out_shardings=whole
                )
            case Upkeep.PAGE_TABLES:
                entries = _words(TABLE_UPDATES)
                return Program(
                    update_page_tables,
                    (state.page_tables, entries, entries),
                    donate=(0,),
                    out_shardings=whole,
                )
            case Upkeep.PENALTIES:
                return Program(
                    count_tokens,
                    (abstract(self.penalties), _words(PENALTY_PIECE + 3)),
                    donate=(0,),
                    out_shardings=whole,
                )


def _words(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.int32)
