import math, sys, time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import jax, jax.numpy as jnp
from benchmarks.quantized_linear import SHAPES, CACHE, passes_for, microseconds
from jaxpaged.quantization.fp8 import Fp8, quantize_rows
from pallas_kernels.quantized_linear_mosaic import quantized_linear_mosaic, TuningConfig as C
from pallas_kernels.quantized_linear import quantized_linear

t0 = time.time()
RATE = 4.3e12

@partial(jax.jit, static_argnums=(0, 1, 2))
def make(D, F, seed):
    w = jax.random.normal(jax.random.key(seed), (F, D)) * D**-0.5
    return Fp8().quantize(w)

def ours(config, x, s, a):
    return quantized_linear_mosaic(x, a["kernel_q"], a["kernel_scale"], s, config=config)

def triton(_, x, s, a):
    return quantized_linear(x, a["kernel_q"], a["kernel_scale"], row_scale_T=s).x

def xla(_, x, s, a):
    y = jax.lax.dot_general(x, a["kernel_q"], (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
    return (y.astype(jnp.float32) * s[:, None] * a["kernel_scale"]).astype(jnp.bfloat16)

def bf16(_, x, s, a):
    return jax.lax.dot_general(x, a["kernel_q"], (((1,), (1,)), ((), ())))

def chain(one, passes, xs, pool):
    def go(_, carry):
        (x, s), y = carry
        cols = []
        for a in pool:
            x, s, y = jax.lax.optimization_barrier((x, s, one(x, s, a)))
            cols.append(y[:, 0])
        return (x, s + 0 * sum(cols).astype(s.dtype)), y
    like = jax.eval_shape(one, *xs, pool[0])
    return jax.lax.fori_loop(0, passes, go, (xs, jnp.zeros(like.shape, like.dtype)))[1]

CASES = {
    1: [C(128, 8, 1, 11), C(128, 8, 2, 6), C(256, 8, 1, 6), C(128, 8, 1, 11, promote=True)],
    16: [C(128, 16, 1, 11), C(128, 16, 2, 5), C(256, 16, 1, 5), C(128, 16, 1, 11, promote=True)],
    64: [C(128, 64, 1, 8), C(128, 64, 2, 4), C(256, 64, 1, 5), C(128, 64, 1, 8, promote=True), C(256, 64, 1, 5, promote=True)],
    128: [C(128, 128, 1, 6), C(256, 128, 1, 4), C(128, 64, 1, 8)],
    256: [C(128, 256, 1, 4), C(256, 128, 1, 4), C(128, 128, 1, 6)],
}
def build(case, passes, xs, pool):
    fn, config = case
    try:
        return jax.jit(partial(chain, partial(fn, config), passes)).lower(xs, pool).compile()
    except Exception as e:
        return repr(e)[:300]

with ThreadPoolExecutor(12) as threads:
    for where in ("gate_up", "down", "qkv", "o"):
        D, F = SHAPES[where]
        nbytes = D * F
        count = max(1, math.ceil(CACHE / nbytes))
        pool = [make(D, F, i) for i in range(count)]
        pool16 = [{"kernel_q": a["kernel_q"].astype(jnp.bfloat16)} for a in pool[: max(1, count // 2)]]
        for T, configs in CASES.items():
            xs = quantize_rows(jax.random.normal(jax.random.key(T), (T, D)))
            want = jnp.dot(xs[0].astype(jnp.float32), pool[-1]["kernel_q"].astype(jnp.float32).T, precision="highest")
            want = want * xs[1][:, None] * pool[-1]["kernel_scale"]
            passes = passes_for(T, where, nbytes, count)
            cases = [(ours, c) for c in configs] + [(xla, None)]
            if T <= 16: cases.append((triton, None))
            built = list(threads.map(lambda c: build(c, passes, xs, pool), cases))
            if T in (1, 64, 256):
                x16 = (xs[0].astype(jnp.bfloat16), xs[1])
                p16 = passes_for(T, where, nbytes * 2, len(pool16))
                run = build((bf16, None), p16, x16, pool16)
                us = microseconds(lambda x, p: run(x, p), x16, pool16, p16 * len(pool16))
                print(f"{where} T {T} bf16: {us} us", flush=True)
            for (fn, c), run in zip(cases, built):
                if isinstance(run, str):
                    print(where, T, c, run, flush=True); continue
                y = run(xs, pool).astype(jnp.float32)
                err = float(jnp.max(jnp.abs(y - want)) / jnp.max(jnp.abs(want)))
                us = microseconds(run, xs, pool, passes * count)
                print(f"{where} T {T} {fn.__name__} {c and (c.block_out, c.block_rows, c.chunks, c.num_stages, c.promote)}: {us} us share {nbytes / RATE * 1e6 / us:.3f} err {err:.2e}  [{time.time()-t0:.0f}s]", flush=True)
        del pool, pool16
