"""Check the sum over two GPUs or more by their own stores, and time it beside XLA's all-reduce.

    NCCL_NVLS_ENABLE=0 python scripts/check_gpu_peer_sum.py

Times a chain of layers of two products, with weights of their own, whose results are added up over
the devices, added to the rows and normalised; once nothing is exchanged. The difference is what an
exchange costs. Returns 1 if any sum is wrong; ends itself if it takes more than two minutes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.parallel.mesh import MODEL, model_mesh
from jaxpaged.parallel.peers import make_boxes, reach_each_other
from pallas_kernels.peer_sum import BOXES, Peers, peer_sum

LIMIT_SECONDS = 120
LAYERS, WEIGHTS, CALLS, REPEATS = 24, 4, 10, 5
WIDTHS, ROWS = (5120, 3584), (8, 64, 128, 256)
IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
WHOLE, SPLIT, COLUMNS = PartitionSpec(), PartitionSpec(MODEL), PartitionSpec(None, MODEL)
EXCHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "XLA's kernel": {},
    "NCCL": {
        "xla_gpu_experimental_use_collective_kernels": "",
        "xla_gpu_enable_command_buffer": f"{IN_GRAPHS},COLLECTIVES",
    },
    "peer_sum": {},
}


def layers(x_TD: jax.Array, weights: Any, addresses_N2: jax.Array, exchange: str) -> jax.Array:
    """What each device computes."""
    rank = lax.axis_index(MODEL)
    for layer in range(LAYERS):
        up, down = weights[layer % WEIGHTS]
        y_TD = jax.nn.silu(x_TD @ up) @ down
        if exchange == "peer_sum":
            peers = Peers(addresses_N2, layer % BOXES)
            y_TD = peer_sum(y_TD, peers, rank, residual_TD=x_TD).x
        else:
            y_TD = x_TD + (y_TD if exchange == "nothing" else lax.psum(y_TD, MODEL))
        y_TD = y_TD.astype(jnp.float32)
        y_TD *= lax.rsqrt(jnp.square(y_TD).mean(-1, keepdims=True) + 1e-6)
        x_TD = y_TD.astype(x_TD.dtype)
    return x_TD


def on(mesh: Mesh, function: Any, *in_specs: Any, out: PartitionSpec) -> Any:
    """On each device."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False)


def check(mesh: Mesh, where_N2: jax.Array, T: int, D: int) -> bool:
    """Whether sums, many in a row, are those of float64, rounded once, on every device."""
    N = mesh.shape[MODEL]
    draw = np.random.default_rng(T)
    parts = draw.normal(size=(N, T, D)).astype(jnp.bfloat16)
    parts[:, 0, :4] = np.array([np.nan, np.inf, 0.0, -0.0])
    bias_D, residual_TD = (draw.normal(size=s).astype(jnp.bfloat16) for s in ((D,), (T, D)))

    def sums(parts: jax.Array, where_N2: jax.Array, bias_D: Any, residual_TD: Any) -> jax.Array:
        rank, out = lax.axis_index(MODEL), []
        for call in range(20):
            scaled = parts[0] * 2.0 ** (call % 5)
            operands = {"bias_D": bias_D, "residual_TD": residual_TD} if call % 2 else {}
            out.append(peer_sum(scaled, Peers(where_N2, call % BOXES), rank, **operands).x)
        return jnp.stack(out)[None]

    run = jax.jit(on(mesh, sums, SPLIT, WHOLE, WHOLE, WHOLE, out=SPLIT))
    f = [np.asarray(x, np.float32) for x in (parts, bias_D, residual_TD)]
    right = True
    for _ in range(10):
        got = np.asarray(run(parts, where_N2, bias_D, residual_TD).astype(jnp.float32))
        for call in range(20):
            want = f[0][0] * 2.0 ** (call % 5)
            for part in f[0][1:]:
                want = want + part * np.float32(2.0 ** (call % 5))
            if call % 2:
                want = want + f[1] + f[2]
            want = want.astype(jnp.bfloat16).astype(np.float32)
            right &= all(np.array_equal(each, want, equal_nan=True) for each in got[:, call])
    print(f"{'right' if right else 'WRONG'}: {T} x {D} on {N} devices", flush=True)
    return right


def seconds(run: Any, x_TD: jax.Array, weights: Any, where_N2: jax.Array) -> float:
    """Median time of a call, many of which follow each other."""
    for _ in range(4):
        x_TD = run(x_TD, weights, where_N2)
    x_TD.block_until_ready()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            x_TD = run(x_TD, weights, where_N2)
        x_TD.block_until_ready()
        taken.append((time.perf_counter() - start) / CALLS)
    return median(taken)


def main() -> int:
    """Check, then time."""
    watchdog = threading.Timer(LIMIT_SECONDS, lambda: (print("too long", flush=True), os._exit(2)))
    watchdog.daemon = True
    watchdog.start()
    devices = jax.devices()
    mesh = model_mesh(devices[: 1 << len(devices).bit_length() - 1])
    assert mesh is not None, "needs two devices or more"
    assert reach_each_other(mesh.devices.flat), "these do not reach each other"
    kept, where_N2 = make_boxes(mesh)
    print(f"{jax.__version__}, {mesh.size} x {devices[0].device_kind}", flush=True)
    right = all(
        [check(mesh, where_N2, *shape) for shape in ((8, 3584), (64, 5120), (3, 512), (256, 5120))]
    )

    def random(*shape: int, spec: PartitionSpec, scale: float = 1.0) -> jax.Array:
        make = lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * scale  # noqa: E731
        return jax.jit(make, out_shardings=NamedSharding(mesh, spec))()

    for D in WIDTHS:
        weights = [
            (random(D, 5120, spec=COLUMNS, scale=D**-0.5), random(5120, D, spec=SPLIT, scale=0.01))
            for _ in range(WEIGHTS)
        ]
        for T in ROWS:
            found = {}
            for exchange, options in EXCHANGES.items():
                function = partial(layers, exchange=exchange)
                specs = WHOLE, [(COLUMNS, SPLIT)] * WEIGHTS, WHOLE
                run = (
                    jax.jit(on(mesh, function, *specs, out=WHOLE), donate_argnums=0)
                    .lower(random(T, D, spec=WHOLE), weights, where_N2)
                    .compile(compiler_options={"xla_gpu_enable_triton_gemm": False, **options})
                )
                taken = seconds(run, random(T, D, spec=WHOLE), weights, where_N2)
                found[exchange] = 1e6 * taken / LAYERS
                extra = found[exchange] - found["nothing"]
                print(
                    f"{T:3d} x {D}, {exchange:12s}: {found[exchange]:6.1f} us a layer, "
                    f"{extra:6.1f} us for the exchange",
                    flush=True,
                )
    del kept
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
