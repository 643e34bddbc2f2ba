"""The sampler against plain NumPy definitions that sort."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from jaxpaged.runtime import sampler
from jaxpaged.runtime.sampler import VARIANTS, PenaltyState, SampleOutput, SamplingBatch

V = 50
MAX_SEQS = 4
MAX_LOGPROBS = 5
DEFAULTS = {"temperature_R": 1.0, "top_p_R": 1.0, "repetition_R": 1.0, "bias_id_RX": -1}


count_tokens = jax.jit(sampler.count_tokens)
edit = jax.jit(sampler._edit)


@partial(jax.jit, static_argnames="variant")
def run(logits, sampling, penalties, variant):
    return sampler.sample(logits, sampling, variant, penalties, max_logprobs=MAX_LOGPROBS)


def batch(variant: str, rows: int, **settings) -> SamplingBatch:
    """Rows that sample in slots 0, 1, ... with everything off, except for `settings`."""
    arrays = {}
    for name, tail, dtype in (("position_R", (), "int32"), *sampler.input_fields(variant, V)):
        array = np.full((rows, *tail), DEFAULTS.get(name, 0), dtype)
        if name == "mask_RW":
            array[:] = 0xFFFFFFFF
        if name == "slot_R":
            array[:] = np.minimum(np.arange(rows), MAX_SEQS)
        if name == "target_R":
            array[:] = -1
        value = np.asarray(settings.get(name, array))
        if name.startswith("bias") and name in settings:
            array[:, : value.shape[-1]] = value
        elif name in settings:
            array[...] = value
        arrays[name] = jnp.asarray(array)
    return SamplingBatch.from_arrays(arrays)


def draw(logits_RV, variant: str, **settings) -> SampleOutput:
    """Padded to few sizes, because every shape is compiled."""
    logits_RV = np.asarray(logits_RV, np.float32)
    rows = len(logits_RV)
    padded = max(16, 1 << (rows - 1).bit_length())
    for name, value in settings.items():
        value = np.asarray(value)
        if value.ndim and len(value) == rows:
            settings[name] = np.concatenate([value, *[value[-1:]] * (padded - rows)])
    logits_RV = np.concatenate([logits_RV, np.zeros((padded - rows, V), np.float32)])
    penalties = PenaltyState.zeros(MAX_SEQS, V) if variant == "full" else None
    out, _ = run(jnp.asarray(logits_RV), batch(variant, padded, **settings), penalties, variant)
    return jax.tree.map(lambda x: np.asarray(x)[:rows], out)


def drawn_tokens(logits_X, count: int, variant: str, **settings) -> np.ndarray:
    """Tokens of `count` rows that differ in their position alone; other ids are impossible."""
    logits = np.full((count, V), -np.inf, np.float32)
    logits[:, : len(logits_X)] = logits_X
    return draw(logits, variant, position_R=np.arange(count), **settings).token_R


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, V)).astype(np.float32) * scale


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = random_logits(4)
    logits[1, [7, 30]] = 50
    out = draw(logits, "greedy")
    assert out.token_R.tolist() == logits.argmax(axis=1).tolist()
    assert out.token_R[1] == 7
    assert out.logprob_R is None


def test_plain_draws_from_the_softmax_at_the_temperature() -> None:
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5, -3.0])
    count = 1 << 14
    for temperature in (0.7, 1.5):
        tokens = drawn_tokens(logits, count, "plain", temperature_R=temperature)
        expected = special.softmax(logits / temperature) * count
        assert stats.chisquare(np.bincount(tokens, minlength=6), expected).pvalue > 1e-3


def test_filtered_draws_from_the_renormalised_rest() -> None:
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5, -3.0])
    count = 1 << 14
    tokens = drawn_tokens(logits, count, "filtered", top_k_R=4, top_p_R=0.9)
    kept = np.isin(np.arange(6), [0, 3, 4])  # 0.92 of the mass of the best four
    expected = special.softmax(logits[kept]) * count
    assert stats.chisquare(np.bincount(tokens, minlength=6)[kept], expected).pvalue > 1e-3
    assert np.bincount(tokens, minlength=6)[~kept].sum() == 0


def test_a_draw_depends_on_seed_choice_and_position_alone() -> None:
    """Equal logits, so that the noise alone decides; eight draws tell two keys apart."""
    rows = 8
    own = {"seed_R2": [[5, 6]], "choice_R": 1, "position_R": np.arange(rows) + 9}

    def tokens(**changed) -> list[int]:
        return draw(np.zeros((rows, V)), "plain", **(own | changed)).token_R.tolist()

    base = tokens()
    assert tokens(slot_R=[3, 2, 1, 0, 3, 2, 1, 0]) == base
    neighbours = np.tile([[5, 6], [7, 8]], (rows // 2, 1))
    assert tokens(seed_R2=neighbours)[::2] == base[::2]
    for seed in ([6, 5], [5, 7], [4, 6]):
        assert tokens(seed_R2=[seed]) != base
    assert tokens(choice_R=0) != base
    assert tokens(position_R=np.arange(rows) + 10) != base


def test_temperature_zero_and_tiny_are_greedy() -> None:
    logits = random_logits(3)
    temperatures = [0, 1e-30, 1e-6]
    tokens = draw(logits, "filtered", temperature_R=temperatures).token_R
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


def test_huge_logits_at_a_small_temperature_stay_finite() -> None:
    logits = np.full((64, V), -3e38, np.float32)
    logits[:, [3, 9]] = 3e38
    tokens = draw(logits, "filtered", temperature_R=2e-5, position_R=np.arange(64)).token_R
    assert set(tokens.tolist()) == {3, 9}


def test_variants_agree_row_by_row() -> None:
    rows = 12
    logits = random_logits(rows)
    settings = {
        "seed_R2": np.arange(2 * rows).reshape(rows, 2),
        "position_R": np.arange(rows) + 3,
        "temperature_R": np.tile([0, 0.8, 1.0], rows // 3),
        "slot_R": np.arange(rows) % MAX_SEQS,
    }
    plain = draw(logits, "plain", **settings).token_R.tolist()
    assert plain[::3] == draw(logits, "greedy").token_R.tolist()[::3]
    for variant in ("filtered", "logprobs", "full"):
        assert draw(logits, variant, **settings).token_R.tolist() == plain
    settings |= {"top_k_R": 5, "top_p_R": 0.7, "min_p_R": 0.01}
    filtered = draw(logits, "filtered", **settings).token_R.tolist()
    assert filtered != plain
    for variant in ("logprobs", "full"):
        assert draw(logits, variant, **settings).token_R.tolist() == filtered


@pytest.mark.parametrize("row", [[np.nan] * V, [-np.inf] * V, [np.nan, *[1.0] * (V - 1)]])
def test_broken_logits_still_give_a_token(row: list[float]) -> None:
    for variant in VARIANTS:
        assert 0 <= draw([row], variant, top_p_R=0.5).token_R[0] < V


def test_logprobs_are_raw_and_ranked() -> None:
    logits = random_logits(3, seed=2)
    target = [-1, 11, int(logits[2].argsort()[-3])]
    out = draw(logits, "logprobs", target_R=target, temperature_R=0.4, top_k_R=1)
    expected = special.log_softmax(logits.astype(np.float64), axis=1)
    assert out.token_R.tolist() == [int(logits[0].argmax()), *target[1:]]
    rows = np.arange(3)
    np.testing.assert_allclose(out.logprob_R, expected[rows, out.token_R], rtol=1e-5)
    assert out.rank_R[0] == 1 and out.rank_R[2] == 3
    best = np.argsort(-expected, axis=1)[:, :MAX_LOGPROBS]
    assert out.top_id_RX.tolist() == best.tolist()
    np.testing.assert_allclose(out.top_logprob_RX, np.take_along_axis(expected, best, 1), rtol=1e-5)


def test_no_logprobs_at_all_can_be_asked() -> None:
    none = jax.jit(partial(sampler.sample, variant="logprobs", penalties=None, max_logprobs=0))
    out, _ = none(jnp.asarray(random_logits(2)), batch("logprobs", 2))
    assert out.top_id_RX.shape == (2, 0) and out.logprob_R.shape == (2,)


def mask_of(allowed: list[int]) -> np.ndarray:
    mask = np.zeros(-(-V // 32), np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    return mask[None]


def test_mask_forbids_in_every_way_of_drawing() -> None:
    rows = 64
    logits = np.tile(random_logits(1), (rows, 1))
    allowed = [0, 31, 32, 49]
    tokens = draw(
        logits, "full", mask_RW=mask_of(allowed), position_R=np.arange(rows), temperature_R=5.0
    ).token_R
    assert set(tokens.tolist()) == set(allowed)
    greedy = draw(logits[:1], "full", mask_RW=mask_of(allowed), temperature_R=0).token_R[0]
    assert greedy == max(allowed, key=lambda token: logits[0, token])


def test_bias_does_not_lift_a_masked_token() -> None:
    token = draw(
        random_logits(1),
        "full",
        mask_RW=mask_of([4, 5]),
        temperature_R=0,
        bias_id_RX=[[9, 5]],
        bias_RX=[[100, 50]],
    ).token_R[0]
    assert token == 5


def test_a_mask_that_allows_nothing_is_ignored() -> None:
    logits = random_logits(2)
    out = draw(logits, "full", mask_RW=mask_of([]), temperature_R=[0, 1])
    free = draw(logits, "full", temperature_R=[0, 1])
    assert out.token_R.tolist() == free.token_R.tolist()


def test_bias_is_added_to_its_tokens_alone() -> None:
    logits = np.zeros((2, V), np.float32)
    logits[:, 3] = 1
    bias = {"bias_id_RX": [[8, -1], [3, -1]], "bias_RX": [[2, 9], [-5, 9]]}
    out = draw(logits, "full", temperature_R=0, **bias)
    assert out.token_R.tolist() == [8, 0]
    assert out.rank_R.tolist() == [2, 2]  # log-probabilities are those before the bias


def penalised(logits_V, prompt, output, repetition=1.0, presence=0.0, frequency=0.0) -> np.ndarray:
    x = logits_V.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= frequency * output.count(token) + presence
    return x


@pytest.mark.parametrize("pieces", [[12], [4, 8], [2, 2, 8]])
def test_penalties(pieces: list[int]) -> None:
    prompt, output = [3, 3, 4, 5], [5, 6, 6, 6, 7, 3, 49, 0]
    ids = prompt + output
    state = PenaltyState(jnp.full((MAX_SEQS + 1, V), 6, jnp.int32).at[MAX_SEQS].set(0))
    start = 0
    for size in pieces:
        piece = np.full(3 + 20, -1, np.int32)
        piece[:3] = 2, max(len(prompt) - start, 0), start == 0
        piece[3 : 3 + size] = ids[start : start + size]
        state = count_tokens(state, jnp.asarray(piece))
        start += size
    assert (state.count_BV[1] == 6).all()  # other slots keep theirs
    logits = random_logits(1, seed=4)
    rules = {"repetition": 1.7, "presence": 0.6, "frequency": 0.9}
    count_RV = state.count_BV[2][None]
    full = batch("full", 1, **{f"{name}_R": value for name, value in rules.items()})
    edited = edit(jnp.asarray(logits), full.edits, count_RV)[0]
    np.testing.assert_allclose(edited, penalised(logits[0], prompt, output, **rules), rtol=1e-5)


def test_counts_follow_the_tokens_sampled() -> None:
    logits = np.zeros((16, V), np.float32)
    logits[:, 9], logits[:, 8] = 1.0, 0.5
    state = PenaltyState.zeros(MAX_SEQS, V)
    settings = {
        "temperature_R": 0,
        "frequency_R": 1.0,
        "slot_R": [1, 2, *[MAX_SEQS] * 14],
        "target_R": [-1, -1, 3, *[-1] * 13],
    }
    seen = []
    for _ in range(3):
        out, state = run(jnp.asarray(logits), batch("full", 16, **settings), state, "full")
        seen.append(out.token_R.tolist())
    assert [row[0] for row in seen] == [9, 8, 0]
    assert [row[2] for row in seen] == [3, 3, 3]
    counts = np.asarray(state.count_BV)
    assert counts[1, [9, 8, 0]].tolist() == [2, 2, 2] and counts[1].sum() == 6
    assert (counts[MAX_SEQS] == 0).all() and (counts[0] == 0).all()


def test_penalty_counts_are_updated_in_place() -> None:
    step = jax.jit(
        lambda logits, sampling, state: sampler.sample(
            logits, sampling, "full", state, max_logprobs=1
        ),
        donate_argnums=2,
    )
    state = PenaltyState.zeros(2000, V)
    compiled = step.lower(jnp.zeros((2, V)), batch("full", 2), state).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < state.count_BV.nbytes / 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_input_fields_are_what_a_batch_is_made_of(variant: str) -> None:
    names = [name for name, _, _ in sampler.input_fields(variant, V)]
    assert len(set(names)) == len(names)
    assert len(jax.tree.leaves(batch(variant, 2))) == len(["position_R", *names])


@pytest.mark.parametrize("variant", ["plain", "filtered"])
def test_the_kernels_draw_the_same_tokens(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted = partial(sampler.sample_top_k_top_p, interpret=True)
    monkeypatch.setattr(sampler, "sample_top_k_top_p", interpreted)
    rows = 8
    settings = {"temperature_R": np.tile([0, 0.8], rows // 2), "position_R": np.arange(rows)}
    if variant == "filtered":
        settings |= {"top_k_R": 5, "top_p_R": 0.7}
    sampling = batch(variant, rows, **settings)
    logits = jnp.asarray(random_logits(rows))

    def tokens(fused: bool) -> list[int]:
        draw = partial(sampler.sample, variant=variant, penalties=None, max_logprobs=0, fused=fused)
        return jax.jit(draw)(logits, sampling)[0].token_R.tolist()

    assert tokens(fused=True) == tokens(fused=False)
