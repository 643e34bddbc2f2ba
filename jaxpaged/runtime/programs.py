"""The closed set of executables of an engine, by key."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxpaged.core.buckets import Bucket, Buckets
from jaxpaged.models.decoder import Decoder, Params, head_params
from jaxpaged.models.prefetch import WINDOW
from jaxpaged.models.spec import PRODUCTS
from jaxpaged.parallel.sharding import kv_pages_sharding, replicated
from jaxpaged.runtime.batch_builder import TABLE_UPDATES
from jaxpaged.runtime.compilation import Program, compile_options
from jaxpaged.runtime.plan import EnginePlan
from jaxpaged.runtime.pooling import embeddings
from jaxpaged.runtime.sampler import VARIANTS, PenaltyState, count_tokens
from jaxpaged.runtime.slot_table import SCORING
from jaxpaged.runtime.step import (
    EngineState,
    StepShapes,
    forward,
    rides_along,
    sample,
    take,
    update_page_tables,
    zero_state,
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


@dataclass(frozen=True)
class Send:
    """Makes so many tokens' hidden states ready for the next stage."""

    num_tokens: int


@dataclass(frozen=True)
class Receive:
    """Copies so many tokens' hidden states from the stage before into the state."""

    num_tokens: int


class Upkeep(Enum):
    """Changes of state beside the steps."""

    PAGE_TABLES = "page tables"
    PENALTIES = "penalties"
    LAST_TOKENS = "last tokens"  # from the last stage to the first


Key = Forward | Sample | Embed | TakeInput | Send | Receive | Upkeep


def all_keys(model: Decoder, buckets: Buckets, input_sizes: Sequence[int]) -> list[Key]:
    """Every executable that a step of this stage may need; those that compile longest first."""
    keys: list[Key] = [Forward(bucket) for bucket in reversed(buckets.forward)]
    if model.is_last:
        for variant in reversed(VARIANTS):
            sizes = buckets.scoring_rows if variant in SCORING else buckets.rows
            keys += [Sample(num_rows, variant) for num_rows in sizes]
        keys += [*map(Embed, buckets.rows), Upkeep.PENALTIES]
    num_tokens = sorted({bucket.num_tokens for bucket in buckets.forward})
    if not model.is_last:
        keys += map(Send, num_tokens)
    if not model.is_first:
        keys += map(Receive, num_tokens)
    elif not model.is_last:
        keys.append(Upkeep.LAST_TOKENS)
    return [*keys, *map(TakeInput, input_sizes), Upkeep.PAGE_TABLES]


def largest_keys(model: Decoder, buckets: Buckets) -> list[Key]:
    """The executables that may need the most scratch memory."""
    largest = [buckets.forward[-1]]
    if model.host_layers:  # a short step may copy further ahead
        largest += [bucket for bucket in buckets.forward if bucket.decode_only][-1:]
    keys: list[Key] = [*map(Forward, largest)]
    return [*keys, Sample(buckets.scoring_rows[-1], "full")] if model.is_last else keys


def smallest_keys(buckets: Buckets) -> list[Key]:
    """One cheap step."""
    return [Forward(buckets.forward[0]), Sample(buckets.rows[0], "greedy")]


@dataclass(frozen=True)
class Programs:
    """Knows the function and the argument shapes behind each key.

    Its arrays are abstract: nothing has to be on a device to compile.
    """

    model: Decoder
    shapes: StepShapes
    max_logprobs: int
    platform: str  # as JAX names it
    params: Params
    state: EngineState
    penalties: PenaltyState | None  # None: this stage does not sample

    def _words(self, count: int) -> jax.ShapeDtypeStruct:
        sharding = self.state.last_token.sharding
        return jax.ShapeDtypeStruct((count,), jnp.int32, sharding=sharding)

    def _copy_into(self, place: jax.Array, front: jax.ShapeDtypeStruct | jax.Array) -> Program:
        return Program(
            take,
            (place, front),
            donate=(0,),
            out_shardings=place.sharding,
            options=compile_options(self.platform),
        )

    def __call__(self, key: Key) -> Program:
        state = self.state
        # The small arrays of the state are whole on every device, and so is all that is sampled.
        whole, options = state.last_token.sharding, compile_options(self.platform)
        match key:
            case Forward(bucket):
                weights, structure = jax.tree.flatten(self.params)
                return Program(
                    functools.partial(forward, self.model, self.shapes, bucket, structure),
                    (tuple(weights), state),
                    donate=(1,),
                    out_shardings=jax.tree.map(lambda array: array.sharding, state),
                    options=compile_options(
                        self.platform,
                        bucket.num_tokens,
                        self.model.spec.width,
                        {scheme.rounds_rows for scheme in self.model.spec.schemes},
                        1 if self.model.mesh is None else self.model.mesh.size,
                        WINDOW * len(PRODUCTS) if self.model.host_layers else 0,
                    ),
                )
            case Sample(num_rows, variant):
                head = self.model.spec.head
                return Program(
                    functools.partial(
                        sample, self.model, self.shapes, num_rows, variant, self.max_logprobs
                    ),
                    (
                        head_params(self.params),
                        state.hidden_RD,
                        state.position_R,
                        state.last_token,
                        self.penalties if variant == "full" else None,
                        state.input_X
                        if rides_along(variant)
                        else self._words(self.shapes.sample_packing(num_rows, variant).size),
                    ),
                    donate=(3, 4),
                    out_shardings=whole,
                    options=compile_options(
                        self.platform,
                        rounds_rows=set() if head is None else {head.scheme.rounds_rows},
                    ),
                )
            case Embed(num_rows):
                return Program(
                    functools.partial(embeddings, num_rows),
                    (state.hidden_RD if state.pooled_RD is None else state.pooled_RD,),
                    donate=(),
                    out_shardings=whole,
                    options=options,
                )
            case TakeInput(size):
                return self._copy_into(state.input_X, self._words(size))
            case Send(num_tokens):
                return Program(
                    lambda hidden_TD: hidden_TD[:num_tokens],
                    (state.hidden_RD,),
                    donate=(),
                    out_shardings=whole,
                    options=options,
                )
            case Receive(num_tokens):
                assert state.x_TD is not None
                shape = (num_tokens, state.x_TD.shape[1])
                sent = jax.ShapeDtypeStruct(shape, state.x_TD.dtype, sharding=whole)
                return self._copy_into(state.x_TD, sent)
            case Upkeep.LAST_TOKENS:
                return self._copy_into(state.last_token, state.last_token)
            case Upkeep.PAGE_TABLES:
                entries = self._words(TABLE_UPDATES)
                return Program(
                    update_page_tables,
                    (state.page_tables, entries, entries),
                    donate=(0,),
                    out_shardings=whole,
                    options=options,
                )
            case Upkeep.PENALTIES:
                return Program(
                    count_tokens,
                    (self.penalties, self._words(PENALTY_PIECE + 3)),
                    donate=(0,),
                    out_shardings=whole,
                    options=options,
                )


def make_programs(
    model: Decoder, plan: EnginePlan, params: Params, max_logprobs: int, device: jax.Device
) -> Programs:
    """The programs of an engine with these (abstract) parameters on `device`."""
    states = abstract_states(model, plan, device)
    return Programs(model, plan.shapes, max_logprobs, device.platform, params, *states)


States = tuple[EngineState, PenaltyState | None]


def zero_states(model: Decoder, plan: EnginePlan, device: jax.Device) -> States:
    """All that outlives a step, of a stage that has computed nothing.

    Args:
        device: where everything lies if the model has no mesh.
    """
    if model.mesh is None:
        with jax.default_device(device):
            return _zero_states(model, plan)
    states = abstract_states(model, plan, device)
    shardings = jax.tree.map(lambda array: array.sharding, states)
    return jax.jit(lambda: _zero_states(model, plan), out_shardings=shardings)()


def abstract_states(model: Decoder, plan: EnginePlan, device: jax.Device) -> States:
    """Shapes and places of `zero_states`: a mesh splits the pages, and has all else on each device.

    Args:
        device: where everything lies if the model has no mesh.
    """
    whole: jax.sharding.Sharding = SingleDeviceSharding(device)
    split = whole
    if model.mesh is not None:
        whole, split = replicated(model.mesh), kv_pages_sharding(model.mesh)

    def place(tree: Any, sharding: jax.sharding.Sharding) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    state, penalties = jax.eval_shape(lambda: _zero_states(model, plan))
    pages = place(state.kv_pages, split)
    return place(state, whole).replace(kv_pages=pages), place(penalties, whole)


def _zero_states(model: Decoder, plan: EnginePlan) -> States:
    state = zero_state(
        model,
        plan.shapes,
        plan.buckets,
        plan.kv.part(model.own_layers).zeros(),
        with_means=plan.pool_means,
    )
    if not model.is_last:
        return state, None
    return state, PenaltyState.zeros(plan.max_num_seqs, model.spec.vocab_rows)
