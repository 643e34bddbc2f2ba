"""The training loop: AdamW under a warmup-cosine schedule, held-out loss, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

from demo_model.batches import Rows
from demo_model.network import Llama

Params = Any


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how hard to train. Rows are the unit of a batch."""

    steps: int = 6000
    batch_size: int = 16
    learning_rate: float = 3e-3
    weight_decay: float = 0.5
    warmup: float = 0.04  # of all steps
    ema_decay: float = 0.998
    evaluate_every: int = 500
    patience: int = 4  # evaluations without a better held-out loss before it stops
    minutes: float = math.inf  # the first evaluation after that is the last
    seed: int = 0


class TrainState(NamedTuple):
    """All that a resumed run needs. `best` are the averaged parameters of the lowest loss."""

    step: jax.Array
    params: Params
    averaged: Params
    optimizer: optax.OptState
    best: Params
    best_step: jax.Array
    best_loss: jax.Array
    worse: jax.Array  # evaluations since


class Outcome(NamedTuple):
    """The best parameters, the steps taken and the seconds this run took, compilation included."""

    params: Params
    best_step: int
    steps: int
    seconds: float
    history: list[dict[str, float]]


def mean_loss(model: Llama, params: Params, rows: Rows, batch_size: int) -> tuple[float, int]:
    """(mean nats of a counted token, how many counted)."""
    total = tokens = 0.0
    for start in range(0, len(rows), batch_size):
        ids, weight = rows.ids_NT1[start : start + batch_size], rows.weight_NT[start:][:batch_size]
        missing = ((0, batch_size - len(ids)), (0, 0))  # one shape, one compilation
        nats = _nats(model, params, np.pad(ids, missing), np.pad(weight, missing))
        total += float(nats)
        tokens += float(weight.sum())
    return total / tokens, int(tokens)


@partial(jax.jit, static_argnums=0)
def _nats(model: Llama, params: Params, ids_NT1: jax.Array, weight_NT: jax.Array) -> jax.Array:
    logits = model.apply({"params": params}, ids_NT1[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids_NT1[:, 1:])
    return (losses * weight_NT).sum()


def train(
    model: Llama,
    config: TrainingConfig,
    epoch: Callable[[int], Rows],
    held_out: Rows,
    checkpoints: Path,
) -> Outcome:
    """Train until `config.steps`, or until the time is up or the held-out loss stops falling; go
    on from the newest checkpoint of the folder if there is one.

    `epoch(i)` gives the rows of the i-th epoch.
    """
    began = time.perf_counter()
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, int(config.warmup * config.steps), config.steps
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay, mask=_decays),
    )
    key = jax.random.key(config.seed)
    params = jax.jit(model.init)(key, held_out.ids_NT1[:1, :-1])["params"]
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(
        step=zero,
        params=params,
        averaged=params,
        optimizer=optimizer.init(params),
        best=params,
        best_step=zero,
        best_loss=jnp.float32(jnp.inf),
        worse=zero,
    )
    history: list[dict[str, float]] = []
    with ocp.CheckpointManager(
        checkpoints.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1)
    ) as manager:
        if (newest := manager.latest_step()) is not None:
            state = manager.restore(newest, args=ocp.args.StandardRestore(state))
        first = int(state.step)
        bar = tqdm(total=config.steps, initial=first, unit="step")
        batches = _batches(epoch, config.batch_size, first)
        for step, (ids, weight) in zip(range(first, config.steps), batches, strict=False):
            state, loss = _train_step(model, optimizer, config, state, key, ids, weight)
            bar.update()
            if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
                held_out_loss, _ = mean_loss(model, state.averaged, held_out, config.batch_size)
                state = _remember_best(state, held_out_loss)
                history.append(
                    {"step": step + 1, "loss": float(loss), "held_out_loss": held_out_loss}
                )
                bar.set_postfix(loss=f"{float(loss):.3f}", held_out=f"{held_out_loss:.4f}")
                manager.save(step + 1, args=ocp.args.StandardSave(state))
                late = time.perf_counter() - began > 60 * config.minutes
                if late or state.worse >= config.patience:
                    break
        bar.close()
    seconds = time.perf_counter() - began
    return Outcome(state.best, int(state.best_step), int(state.step), seconds, history)


def _batches(
    epoch: Callable[[int], Rows], batch_size: int, first: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The endless stream of batches, from batch number `first` on. A thread makes the epoch that
    comes next while the device is at work."""
    number = 0
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(epoch, 0)
        for i in count(1):
            rows, coming = coming.result(), pool.submit(epoch, i)
            for start in range(0, len(rows) - batch_size + 1, batch_size):
                if number >= first:
                    stop = start + batch_size
                    yield rows.ids_NT1[start:stop], rows.weight_NT[start:stop]
                number += 1


@partial(jax.jit, static_argnums=(0, 1, 2))
def _train_step(
    model: Llama,
    optimizer: optax.GradientTransformation,
    config: TrainingConfig,
    state: TrainState,
    key: jax.Array,
    ids_NT1: jax.Array,
    weight_NT: jax.Array,
) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Params) -> jax.Array:
        logits = model.apply(
            {"params": params},
            ids_NT1[:, :-1],
            train=True,
            rngs={"dropout": jax.random.fold_in(key, state.step)},
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids_NT1[:, 1:])
        return (losses * weight_NT).sum() / weight_NT.sum()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    updates, opt_state = optimizer.update(gradients, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    # A short memory while the first steps are still far off.
    decay = jnp.minimum(config.ema_decay, (1 + state.step) / (10 + state.step))
    averaged = optax.incremental_update(params, state.averaged, 1 - decay)
    return state._replace(
        step=state.step + 1, params=params, averaged=averaged, optimizer=opt_state
    ), loss


def _remember_best(state: TrainState, held_out_loss: float) -> TrainState:
    if held_out_loss < float(state.best_loss):
        return state._replace(
            best=state.averaged,
            best_step=state.step,
            best_loss=jnp.float32(held_out_loss),
            worse=jnp.zeros((), jnp.int32),
        )
    return state._replace(worse=state.worse + 1)


def _decays(params: Params) -> Params:
    """Weight decay for matrices, not for the norms' scales."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
