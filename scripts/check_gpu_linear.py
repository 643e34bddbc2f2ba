"""Check a layer's products on the GPU, and time those of few rows beside XLA's.

Products of few rows against float64, quantized ones against XLA's of the same weights, gated rows
that several programs round against those of one. Prints a line a product, then microseconds a
layer of a chain of layers' four products, with norms, activation and residuals, each layer with
weights of its own. Returns 1 if any product is wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product as product_of
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.layers.linear import Linear
from jaxpaged.quantization import ON_THE_FLY, Scheme, arrange
from pallas_kernels import round_rows
from pallas_kernels.rms_norm import Norm, Rows

LAYERS = 28
D, F, HEADS, QKV = 1024, 3072, 2048, 4096  # Qwen3 0.6B
SHAPES = {"qkv": (D, (QKV,)), "o": (HEADS, (D,)), "gate_up": (D, (2, F)), "down": (F, (D,))}
Params = dict[str, jax.Array]


def product(
    name: str, params: Params, rows: Rows, fuse: bool, scheme: Scheme | None = None, **options: Any
) -> Rows:
    """One of the layer's products as the model runs it."""
    inputs, outputs = SHAPES[name]
    axes = (None,) * len(outputs)
    layer = Linear((inputs,), outputs, (None,), axes, dtype=jnp.bfloat16, fuse=fuse, scheme=scheme)
    weights = {"kernel": params[name]} if scheme is None else stored(scheme, params[name])
    return layer.apply({"params": weights}, rows, **options)


def stored(scheme: Scheme, kernel: jax.Array) -> Params:
    """What a scheme makes of a kernel [inputs, *outputs]."""
    rows = jnp.moveaxis(kernel.astype(jnp.float32), 0, -1)
    made = scheme.quantize(rows)
    return {name: arrange(name, x, x.ndim == rows.ndim) for name, x in made.items()}


def run_layer(
    params: Params,
    rows: Rows,
    fuse: bool,
    scheme: Scheme | None = None,
    given: dict[str, jax.Array] | None = None,
) -> dict[str, Rows]:
    """What each of a layer's products makes of the one before; attention is left out.

    All norms have the same factors.

    Args:
        given: what each makes, so that all are made of the same.
    """
    run = partial(product, params=params, fuse=fuse, scheme=scheme)
    norm = Norm(params["scale"], 1e-6, plus_one=False)

    def after(name: str, made: Rows) -> Rows:
        return made if given is None else Rows(given[name])

    qkv = run("qkv", rows=rows, norm=norm)
    heads = Rows(after("qkv", qkv).x[:, :HEADS])
    o = run("o", rows=heads, residual=rows.x, next_norm=norm)
    gate_up = run("gate_up", rows=after("o", o), norm=norm, activation="silu")
    residual = after("o", o).x
    down = run("down", rows=after("gate_up", gate_up), residual=residual, next_norm=norm)
    return {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down}


def random(key: int, *shape: int, scale: float) -> jax.Array:
    """Normal bfloat16 numbers."""
    return (jax.random.normal(jax.random.key(key), shape) * scale).astype(jnp.bfloat16)


def weights(key: int) -> Params:
    """A layer's kernels and norm factors, which keep the size of what passes through."""
    params = {
        name: random(key + i, inputs, *outputs, scale=inputs**-0.5)
        for i, (name, (inputs, outputs)) in enumerate(SHAPES.items())
    }
    return {**params, "scale": 1 + random(key + 9, D, scale=0.2)}


def check(T: int) -> bool:
    """Whether each product, given the same rows, is within bfloat16's rounding of float64."""
    params, x_TD = weights(0), random(99, T, D, scale=1)
    run = jax.jit(partial(run_layer, fuse=True))
    got, again = ({name: y.x for name, y in run(params, Rows(x_TD)).items()} for _ in range(2))
    f = {name: np.asarray(x, np.float64) for name, x in {**params, "x": x_TD}.items()}
    y = {name: np.asarray(x, np.float64) for name, x in got.items()}

    def normed(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * f["scale"]

    gate, up = np.moveaxis(np.tensordot(normed(y["o"]), f["gate_up"], 1), 1, 0)
    want = {
        "qkv": normed(f["x"]) @ f["qkv"],
        "o": f["x"] + y["qkv"][:, :HEADS] @ f["o"],
        "gate_up": gate / (1 + np.exp(-gate)) * up,
        "down": y["o"] + y["gate_up"] @ f["down"],
    }
    good = True
    for name in SHAPES:
        worst = (np.abs(y[name] - want[name]) / (1 + np.abs(want[name]))).max()
        fine = bool(worst < 2e-2 and (got[name] == again[name]).all())  # NaN is not
        print("ok  " if fine else "BAD ", f"{worst:.1e}", name, f"T {T}", flush=True)
        good &= fine
    return good


def compile_scheme(case: tuple[str, int]) -> Callable[[], bool]:
    """What checks a scheme at so many rows: whether each product is what XLA makes of the same.

    Where rows are rounded, one may go to its neighbour in e4m3 on either side.
    """
    name, T = case
    run = partial(run_layer, scheme=ON_THE_FLY[name].scheme)
    params, rows = weights(0), Rows(random(99, T, D, scale=1))
    fused = jax.jit(partial(run, fuse=True)).lower(params, rows).compile()
    like = {key: y.x for key, y in jax.eval_shape(partial(run, fuse=True), params, rows).items()}
    plain = jax.jit(partial(run, fuse=False)).lower(params, rows, given=like).compile()

    def check() -> bool:
        got = {key: y.x for key, y in fused(params, rows).items()}
        wanted = plain(params, rows, given=got)
        good = True
        for key in SHAPES:
            y, want = (np.asarray(x, np.float64) for x in (got[key], wanted[key].x))
            away = np.abs(y - want) / (1 + np.abs(want))
            fine = bool(away.max() < 0.25 and away.mean() < 1e-2)  # NaN is not
            verdict = "ok  " if fine else "BAD "
            print(verdict, f"{away.max():.1e} {away.mean():.1e}", key, name, f"T {T}", flush=True)
            good &= fine
        return good

    return check


def check_gates(T: int) -> bool:
    """Whether rows that several programs share are rounded as by one, time after time."""
    width = 18944
    sums, scale_2F = random(1, T, 2, width, scale=30), jnp.full((2, width), 0.1, jnp.float32)
    given = sums, jnp.full((T, 1), 0.1, jnp.float32), scale_2F
    run = partial(round_rows.round_gated, activation="silu", dtype=jnp.bfloat16)
    shared = jax.jit(lambda *given: run(*given)).lower(*given).compile()
    with mock.patch.object(round_rows, "most_sharing", lambda: 0):
        alone = jax.jit(lambda *given: run(*given)).lower(*given).compile()
    wanted = [np.asarray(x).view(np.uint8) for x in alone(*given)]
    found = [shared(*given) for _ in range(20)]
    same = [
        (np.asarray(x).view(np.uint8) == want).all()
        for rounded in found
        for x, want in zip(rounded, wanted, strict=True)
    ]
    programs = round_rows.gated_layout(T, width).programs
    print("ok  " if all(same) else "BAD ", f"rounded by {programs} programs T {T}", flush=True)
    return all(same)


def microseconds(T: int, fuse: bool) -> float:
    """A layer's share of a chain of layers, median of five."""
    scale = weights(0)["scale"]  # of all norms: the layer before begins a layer's first
    layers = [{**weights(100 * i), "scale": scale} for i in range(LAYERS)]

    @jax.jit
    def chain(layers: list[Params], x_TD: jax.Array) -> jax.Array:
        rows = Rows(x_TD)
        for params in layers:
            rows = run_layer(params, rows, fuse)["down"]
        return rows.x

    x_TD, taken = random(98, T, D, scale=1), []
    jax.block_until_ready([chain(layers, x_TD) for _ in range(3)])
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([chain(layers, x_TD) for _ in range(20)])
        taken.append(time.perf_counter() - start)
    return sorted(taken)[2] / 20 / LAYERS * 1e6


def main() -> int:
    """Check, then time; returns 1 if any product is wrong."""
    good = all([check(T) for T in (1, 8, 16, 27, 32, 64)])
    good &= all([check_gates(T) for T in (17, 64, 132)])
    cases = list(product_of(ON_THE_FLY, (5, 12, 30, 200)))
    with ThreadPoolExecutor() as pool:  # most of it is compiling
        good &= all([check() for check in list(pool.map(compile_scheme, cases))])
    for T in (8, 16, 32, 64):
        xla, fused = microseconds(T, False), microseconds(T, True)
        print(f"T {T}: {fused:.1f} us a layer, XLA {xla:.1f}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
