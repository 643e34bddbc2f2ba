from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax import linen as nn
from paged_runner import PagedRunner, make_decoder

from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.models import decoder_layer
from jaxpaged.models.decoder import abstract_params, head_params
from jaxpaged.runtime.weights import load_params


def abstract_batch(num_groups: int, T: int = 8, B: int = 4) -> StepBatch:
    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return StepBatch(
        token_T=ints(T),
        position_T=ints(T),
        seq_T=ints(T),
        query_start_B1=ints(B + 1),
        kv_len_B=ints(B),
        num_decodes=ints(),
        num_seqs=ints(),
        page_tables=(ints(B, 8),) * num_groups,
        row_R=ints(3),
    )


def test_equal_layers_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 layers of two kinds, in six KV groups, are two traces."""
    traced = []
    attend = decoder_layer.attend

    def counting(*args, **options):
        traced.append(options["window"])
        return attend(*args, **options)

    monkeypatch.setattr(decoder_layer, "attend", counting)
    config = {
        **tiny_models.CONFIGS["gemma3-old"],
        "num_hidden_layers": 18,
        "sliding_window_pattern": 6,
    }
    model = make_decoder(config)
    assert len(model.kv.groups) == 6
    params = nn.meta.unbox(abstract_params(model))
    traced.clear()
    slots, pages = jax.ShapeDtypeStruct((5,), jnp.int32), jax.eval_shape(model.kv.zeros)
    jax.jit(model.apply).trace({"params": params}, abstract_batch(6), slots, pages)
    assert sorted(traced, key=str) == [9, None]


def test_logits_need_the_head_alone() -> None:
    for name, leaf in (("llama2", "lm_head"), ("llama3", "embed")):
        model = make_decoder(tiny_models.CONFIGS[name])
        params = head_params(nn.meta.unbox(abstract_params(model)))
        assert list(params) == [leaf]
        hidden = jax.ShapeDtypeStruct((3, model.spec.width), jnp.float32)
        logits = jax.eval_shape(partial(model.apply, method="logits"), {"params": params}, hidden)
        assert (logits.shape, logits.dtype) == ((3, model.spec.vocab), jnp.float32)


def test_forward_returns_the_rows_asked_for() -> None:
    model = make_decoder(tiny_models.CONFIGS["llama2"], dtype=jnp.bfloat16)
    params = nn.meta.unbox(abstract_params(model))
    forward = partial(model.apply, method="forward")
    slots, pages = jax.ShapeDtypeStruct((5,), jnp.int32), jax.eval_shape(model.kv.zeros)
    hidden, new_pages = jax.eval_shape(forward, {"params": params}, abstract_batch(1), slots, pages)
    assert (hidden.shape, hidden.dtype) == ((3, model.spec.width), jnp.bfloat16)
    assert new_pages == pages


def test_embedding_scale_is_rounded_like_the_embeddings() -> None:
    """Hugging Face rounds sqrt(640) to bfloat16 before it multiplies."""
    model = make_decoder(
        {**tiny_models.CONFIGS["gemma3-old"], "hidden_size": 640}, dtype=jnp.bfloat16
    )
    jaxpr = jax.make_jaxpr(model.apply)(
        {"params": nn.meta.unbox(abstract_params(model))},
        abstract_batch(len(model.kv.groups)),
        jax.ShapeDtypeStruct((5,), jnp.int32),
        jax.eval_shape(model.kv.zeros),
    )
    factors = [
        float(operand.val)
        for equation in jaxpr.jaxpr.eqns
        if equation.primitive.name == "mul"
        for operand in equation.invars
        if hasattr(operand, "val") and operand.aval.dtype == jnp.bfloat16
    ]
    assert factors == [25.25]


def test_half_precision_stays_close_to_float32(tmp_path: Path) -> None:
    """The same weights in bfloat16: log-probabilities of the prompt's end within its rounding."""
    config = tiny_models.CONFIGS["gemma3-new"]
    folder = tiny_models.write_model(tmp_path, config)
    rows = []
    for dtype in (jnp.float32, jnp.bfloat16):
        model = make_decoder(config, dtype=dtype)
        runner = PagedRunner(model, load_params(folder, model, progress=False))
        _, logits = runner.generate(tiny_models.prompts()[:1], 1)
        rows.append(jax.nn.log_softmax(jnp.asarray(logits[0][0])))
    assert float(np.abs(rows[0] - rows[1]).max()) < 0.25
