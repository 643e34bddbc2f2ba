import math, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from benchmarks.quantized_linear import SHAPES, weights
from jaxpaged.quantization import ON_THE_FLY
from jaxpaged.quantization.fp8 import quantize_rows
from pallas_kernels.quantized_linear_mosaic import quantized_linear_mosaic, tuning_config, TuningConfig as C
from pallas_kernels.mosaic_elements import RUN
from pallas_kernels.rms_norm import HalfNormed

t0 = time.time()
RATE = 4.3e12
NAMES = {"fp8": "fp8_per_channel", "int8": "int8_per_channel_weight_only", "int4": "int4_per_group_weight_only"}

def options(where, T, D, F, key, dtype):
    k = jax.random.split(jax.random.key(key), 4)
    if where == "gate_up":
        return {"activation": "silu"}
    if where == "qkv":
        return {"bias_F": jax.random.normal(k[0], (F,)).astype(dtype)}
    return {"residual_TF": jax.random.normal(k[0], (T, F)).astype(dtype), "next_scale_F": jax.random.normal(k[1], (F,)).astype(dtype)}

def dense(a, dtype=jnp.float32):
    q = a["kernel_q"]
    if q.dtype == jnp.uint16:
        q = (q.reshape(q.shape[0], -1, 1, 16) >> np.arange(0, 16, 4, dtype=np.uint16)[:, None]) & 15
        q = q.reshape(q.shape[0], -1).astype(jnp.float32) - 8
    q, s = q.astype(jnp.float32), a["kernel_scale"]
    s = s if s.ndim == 2 else s[None]
    if "kernel_zero" in a:
        q -= jnp.repeat(a["kernel_zero"].astype(jnp.float32), q.shape[1] // s.shape[0], axis=0).T
    return q * jnp.repeat(s, q.shape[1] // s.shape[0], axis=0).T

@jax.jit
def reference(x, row_scale, square, a, opts):
    D = x.shape[1]
    y = jnp.dot(x.astype(jnp.float32), dense(a).T, precision="highest")
    if row_scale is not None: y *= row_scale[:, None]
    if square is not None: y *= jax.lax.rsqrt(square.sum(0) / D + 1e-6)[:, None]
    if "bias_F" in opts: y += opts["bias_F"].astype(jnp.float32)
    return y

def want_of(x, row_scale, square, a, opts):
    arrays = {k: v for k, v in opts.items() if k != "activation"}
    y = reference(x, row_scale, square, a, arrays)
    if "activation" in opts:
        g, u = jnp.split(y, 2, axis=1); y = jax.nn.silu(g) * u
    if "residual_TF" in opts: y += opts["residual_TF"].astype(jnp.float32)
    return y

def run_one(config, opts_static, x, row_scale, square, a, opts):
    return quantized_linear_mosaic(
        x if square is None else HalfNormed(x, square), a["kernel_q"], a["kernel_scale"], zero_GF=a.get("kernel_zero"),
        eps=1e-6, config=config, activation=opts_static, **opts)

def chain(one, passes, args, pool):
    def go(_, carry):
        x, y = carry
        cols = []
        for a in pool:
            x, y = jax.lax.optimization_barrier((x, one(x, *args[1:3], a, args[3])))
            cols.append(y.x[:1, :1].astype(jnp.float32))
        return (x.astype(jnp.float32) + 0 * sum(cols)).astype(x.dtype), y
    like = jax.eval_shape(one, *args[:3], pool[0], args[3])
    first = args[0], jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
    return jax.lax.fori_loop(0, passes, go, first)[1]

def inputs(kind, T, D, dtype=jnp.bfloat16, norm=True):
    x = jax.random.normal(jax.random.key(T), (T, D))
    if kind == "fp8":
        q, s = quantize_rows(x)
        return q, s, None
    return x.astype(dtype), None, (jnp.square(x).reshape(T, D // 64, -1).sum(-1)).T if norm else None

CASES = {kind: {T: [None] for T in (1, 16, 32, 64, 128, 256)} for kind in ("int4", "int8")}
CASES["int4"][64] = [None, C(64, 1, 4)]
CASES["int8"][64] = [None, C(64, 1, 6)]
CASES["int4"][256] = [C(128, 2, 2)]
CASES["int8"][256] = [C(128, 2, 4)]
# D, F, kind, groups, zero, dtype, T, where, config
SMALL = [
    (1024, 512, "int4", 8, True, "bfloat16", 5, "qkv", C(32, 1, 4)), (1024, 512, "int4", 8, True, "float16", 37, "down", C(64, 1, 4)),
    (1024, 512, "int4", 16, True, "bfloat16", 100, "gate_up", C(128, 2, 2)), (1024, 1024, "int4", 2, False, "bfloat16", 20, "gate_up", C(32, 2, 4)),
    (1024, 512, "int4", 1, True, "bfloat16", 33, "down", C(64, 2, 4)), (1024, 512, "int8", 1, False, "float16", 70, "qkv", C(128, 2, 4)),
    (1024, 512, "int8", 16, True, "bfloat16", 33, "gate_up", C(64, 2, 4)), (1024, 512, "int8", 8, False, "bfloat16", 200, "down", C(128, 2, 3)),
    (1024, 768, "int8", 4, True, "bfloat16", 17, "down", C(32, 2, 4)), (18944, 3584, "int4", 148, True, "bfloat16", 64, "down", C(64, 2, 4)),
]
def small(case):
    D, F, kind, groups, zero, dtype, T, where, config = case
    key = jax.random.key(D + T)
    if kind == "fp8":
        a = weights(NAMES[kind], D, F, 7)
    else:
        q = jax.random.randint(key, (F, D), -8, 8) if kind == "int4" else jax.random.randint(key, (F, D), -127, 128)
        q = q.astype(jnp.int8)
        if kind == "int4":
            from jaxpaged.quantization.weight_only import pack_int4
            q = pack_int4(q)
        s = jax.random.uniform(key, (groups, F) if groups > 1 else (F,)) * (0.01 if kind == "int4" else 0.0005)
        a = {"kernel_q": q, "kernel_scale": s}
        if zero: a["kernel_zero"] = jax.random.randint(key, (groups, F), -8, 9 if kind == "int4" else 100).astype(jnp.int8)
    x, s, sq = inputs(kind, T, D, jnp.dtype(dtype))
    opts = options(where, T, D, F, 3, jnp.dtype(dtype))
    act = opts.get("activation")
    arrays = {k: v for k, v in opts.items() if k != "activation"}
    f = jax.jit(partial(run_one, config, act))
    got = f(x, s, sq, a, arrays)
    again = f(x, s, sq, a, arrays)
    want = want_of(x, s, sq, a, opts)
    err = float(jnp.max(jnp.abs(got.x.astype(jnp.float32) - want)) / jnp.max(jnp.abs(want)))
    same = bool(jnp.all(got.x == again.x))
    more = ""
    if got.half_normed is not None:
        nx, nsq = got.half_normed
        more = f" next {float(jnp.max(jnp.abs(nx.astype(jnp.float32) - (got.x * opts['next_scale_F']).astype(jnp.float32)))):.2e}"
        sqw = jnp.square(got.x.astype(jnp.float32)).sum(1)
        more += f" square {float(jnp.max(jnp.abs(nsq.sum(0) - sqw) / sqw)):.2e}"
    return f"small {case}: err {err:.2e} same {same}{more} {'OK' if err < 1e-2 and same else 'BAD'}"

def build(config, act, passes, args, pool):
    try:
        one = partial(run_one, config, act)
        return jax.jit(one).lower(*args[:3], pool[0], args[3]).compile(), jax.jit(partial(chain, one, passes)).lower(args, pool).compile()
    except Exception as e:
        return repr(e)[:400]

def timed(run, args, pool, calls):
    for _ in range(2): jax.block_until_ready(run(args, pool))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(3): y = run(args, pool)
        jax.block_until_ready(y)
        times.append((time.perf_counter() - start) / (3 * calls))
    return sorted(times)[1] * 1e6

def main():
    with ThreadPoolExecutor(14) as threads:
        checks = [threads.submit(_try, small, c) for c in SMALL]
        for check in checks:
            print(check.result(), flush=True)
        print(f"[{time.time()-t0:.0f}s]", flush=True)
        work = []
        for kind in ("int4", "int8"):
            for where in ("gate_up", "down"):
                D, F = SHAPES[where]
                base = weights(NAMES[kind], D, F, 0)
                nbytes = sum(a.nbytes for a in base.values())
                pool = [base] + [jax.tree.map(jnp.copy, base) for _ in range(4)]
                for T, configs in CASES[kind].items():
                    opts = options(where, T, D, F, 3, jnp.bfloat16)
                    act = opts.pop("activation", None)
                    args = (*inputs(kind, T, D, norm=where != "down"), opts)
                    passes = math.ceil(2e-3 / (max(nbytes / RATE, 6e-6) * len(pool)))
                    for config in configs:
                        label = f"{kind} {where} T {T} {config and (config.block_rows, config.cluster, config.num_stages)}"
                        work.append((label, nbytes, passes, args, pool, threads.submit(build, config, act, passes, args, pool)))
        built = [(*w[:-1], w[-1].result()) for w in work]
    print(f"built [{time.time()-t0:.0f}s]", flush=True)
    for label, nbytes, passes, args, pool, run in built:
        if isinstance(run, str):
            print(label, run, flush=True); continue
        us = timed(run[1], args, pool, passes * len(pool))
        print(f"{label}: {us:.1f} us share {nbytes / RATE * 1e6 / us:.3f}", flush=True)

def _try(f, c):
    try: return f(c)
    except Exception as e: return f"FAILED {c} {repr(e)[:500]}"
if __name__ == "__main__":
    main()
    print(f"done [{time.time()-t0:.0f}s]", flush=True)
