"""Compile the kernels for an H200 on a machine that has none; prints a line a case.

A program of its own: it needs the CUDA plugin's compiler, and a kernel that does not fit a
target can take the process with it. Run by test_deviceless_compile.py.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import dependents
from pallas_kernels import round_rows as rounding
from pallas_kernels.paged_attention_triton import paged_attention_triton
from pallas_kernels.peer_sum import Peers, peer_sum
from pallas_kernels.quantized_linear import quantized_linear
from pallas_kernels.rms_norm import Norm, Rows, half_norm
from pallas_kernels.rope_write import Written, rope_write
from pallas_kernels.round_rows import MAX_WIDTH, round_added, round_gated, round_rows
from pallas_kernels.sample_top_k_top_p import sample_top_k_top_p
from pallas_kernels.small_batch_linear import small_batch_linear
from pallas_kernels.wide_integers import packed

SHAPES = {
    "qwen2.5-7b": {"N": 28, "K": 4, "H": 128},
    "llama-3.1-8b": {"N": 32, "K": 8, "H": 128},
    "qwen3-0.6b": {"N": 16, "K": 8, "H": 128},
    "gemma-3": {"N": 4, "K": 1, "H": 256, "window": 512},
    "head-80": {"N": 8, "K": 8, "H": 80, "softcap": 30.0},
    "head-96": {"N": 16, "K": 1, "H": 96},
    "head-64": {"N": 14, "K": 2, "H": 64, "S": 64},
}


POOL = 4096  # pages


def scales_shape(pages: str | None, P: int, K: int, S: int) -> tuple[int, ...] | None:
    """Of the scales that pages of this dtype have."""
    if pages is None:
        return None
    return (P, 2, K, S) if pages == "int8" else (2, K)


def pages_of_one_byte(gib: int, *, K: int, H: int, S: int = 16, **_: float) -> int:
    """How many fill an array of so many GiB."""
    return (gib << 30) // (2 * K * S * H)


def h200_mesh(card: str = "h200", devices: int = 1) -> Mesh:
    """A mesh of such cards, or of others whose description lies here."""
    target = Path(__file__).parent / f"{card}_target.textproto"
    topology = topologies.get_topology_desc(
        card, "cuda", target_config=target.read_text(), topology=f"1x1x{devices}"
    )
    return Mesh(np.array(topology.devices), ("x",), axis_types=(AxisType.Auto,))


def compile_step(
    mesh: Mesh,
    dtype: str,
    T: int,
    B: int,
    decode_only: bool,
    *,
    N: int,
    K: int,
    H: int,
    S: int = 16,
    M: int = 512,
    P: int = POOL,
    pages: str | None = None,
    **options: float,
) -> jax.stages.Compiled:
    sharding = NamedSharding(mesh, PartitionSpec())

    def like(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    scales = scales_shape(pages, P, K, S)

    step = jax.jit(
        partial(paged_attention_triton, scale=H**-0.5, decode_only=decode_only, **options)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return step.lower(
            like((T, N, H), dtype),
            like((P, 2, K, S, H), pages or dtype),
            like((B, M)),
            query_start_B1=like((B + 1,)),
            kv_len_B=like((B,)),
            num_decodes=like(()),
            num_seqs=like(()),
            page_scales=None if scales is None else like(scales, "float32"),
        ).compile()


def compile_rope_write(
    mesh: Mesh,
    dtype: str,
    T: int,
    *,
    N: int,
    K: int,
    H: int,
    S: int = 16,
    P: int = POOL,
    pages: str | None = None,
    **_: float,
) -> jax.stages.Compiled:
    sharding = NamedSharding(mesh, PartitionSpec())

    def like(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    def write(*operands: jax.Array, page_scales: jax.Array | None) -> Written:
        return rope_write(*operands, page_scales=page_scales, eps=1e-6, plus_one=True)

    table, scales = like((T, H // 2), "float32"), scales_shape(pages, P, K, S)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return (
            jax.jit(write, donate_argnums=3, donate_argnames="page_scales")
            .lower(
                like((T, K, N // K + 2, H), dtype),
                table,
                table,
                like((P, 2, K, S, H), pages or dtype),
                like((T,)),
                like((T,)),
                (like((H,), dtype), like((H,), dtype)),
                page_scales=None if scales is None else like(scales, "float32"),
            )
            .compile()
        )


def compile_sampling(mesh: Mesh, R: int, V: int = 151_936) -> jax.stages.Compiled:
    sharding = NamedSharding(mesh, PartitionSpec())

    def like(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    per_row = like(R, dtype="float32")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(sample_top_k_top_p).lower(
            like(R, V, dtype="float32"),
            seed_R2=like(R, 2, dtype="uint32"),
            choice_R=like(R),
            position_R=like(R),
            temperature_R=per_row,
            top_k_R=like(R),
            top_p_R=per_row,
            min_p_R=per_row,
        )
        return lowered.compile()


# D, columns, activation, what else: the matrices of Qwen3 0.6B, and Llama 3.2 1B's first two.
LINEAR: tuple[tuple[int, tuple[int, ...], str | None, set[str]], ...] = (
    (1024, (4096,), None, {"norm"}),
    (2048, (1024,), None, {"residual_TF", "next_scale_F"}),
    (1024, (2, 3072), "silu", {"norm"}),
    (1024, (2, 3072), "gelu_pytorch_tanh", {"norm", "bias"}),
    (3072, (1024,), None, {"residual_TF", "next_scale_F"}),
    (2048, (3072,), None, {"norm", "bias"}),
    (2048, (2048,), None, {"residual_TF"}),
)


def compile_linear(
    mesh: Mesh, T: int, D: int, columns: tuple[int, ...], activation: str | None, others: set[str]
) -> jax.stages.Compiled:
    sharding = NamedSharding(mesh, PartitionSpec())

    def like(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def product(x_TD: jax.Array, kernel: jax.Array, options: dict[str, jax.Array]) -> Rows:
        options = dict(options)
        norm = options.pop("norm", None)
        x = x_TD if norm is None else half_norm(x_TD, norm)
        return small_batch_linear(x, kernel, eps=1e-6, activation=activation, **options)

    every = {
        "norm": like(D),
        "bias": like(*columns),
        "residual_TF": like(T, columns[-1]),
        "next_scale_F": like(columns[-1]),
    }
    operands = like(T, D), like(D, *columns), {name: every[name] for name in others}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(product).lower(*operands).compile()


# D, F, kernel, dtype of the rows, groups: the products of Qwen2.5 7B in every storage.
QUANTIZED: tuple[tuple[int, int, str, str, int], ...] = (
    (3584, 4608, "float8_e4m3fn", "bfloat16", 1),
    (3584, 37888, "float8_e4m3fn", "bfloat16", 1),
    (3584, 37888, "float8_e4m3fn", "bfloat16", 28),
    (18944, 3584, "int16", "bfloat16", 1),
    (3584, 3584, "uint16", "bfloat16", 28),
    (896, 896, "uint16", "float16", 7),
)


def compile_quantized(
    mesh: Mesh, T: int, D: int, F: int, kernel: str, rows: str, groups: int
) -> jax.stages.Compiled:
    """A product that completes a norm, or one of rows rounded to e4m3; the widest is gated, the
    others are added to a residual, where the next norm begins.
    """
    sharding = NamedSharding(mesh, PartitionSpec())

    def like(shape: tuple[int, ...], dtype: str = rows) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    def product(
        x_TD: jax.Array, factor_D: jax.Array, kernel_FX: jax.Array, scale: jax.Array, **rest: Any
    ) -> Rows:
        norm, x, activation = Norm(factor_D, 1e-6, False), half_norm(x_TD, factor_D), None
        if kernel == "float8_e4m3fn":
            x, scale_T1 = round_rows(x_TD, norm)
            rest["row_scale_T"] = scale_T1[:, 0]
        if "residual_TF" not in rest:
            activation = "silu"
        return quantized_linear(
            x, kernel_FX, scale, eps=1e-6, activation=activation, dtype=jnp.dtype(rows), **rest
        )

    scale = (groups, F) if groups > 1 else (F,)
    rest = {"bias_F": like((F,))}
    if F < 10_000:
        rest |= {"residual_TF": like((T, F)), "next_scale_F": like((F,))}
    if kernel == "uint16":
        rest["zero_GF"] = like(scale, "int8")
    stored = like((F, D // packed(kernel)), kernel)
    operands = like((T, D)), like((D,)), stored, like(scale, "float32")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(product).lower(*operands, **rest).compile()


# Width, dtype of the sums and of what is rounded: Qwen2.5 7B's two, and the widest in registers.
ROUNDED = (
    (3584, "bfloat16", "bfloat16"),
    (18944, "bfloat16", "bfloat16"),
    (MAX_WIDTH, "float32", "float16"),
)


def compile_rounded(
    mesh: Mesh, T: int, width: int, sums: str, dtype: str
) -> list[jax.stages.Compiled]:
    """Sums gated, and added to a residual."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def like(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    def gated(*operands: jax.Array) -> Any:
        *others, bias_2F = operands
        return round_gated(*others, "silu", bias_2F, dtype=jnp.dtype(dtype))

    def added(*operands: jax.Array) -> Rows:
        *others, factor_D, bias_D = operands
        return round_added(*others, Norm(factor_D, 1e-6, True), bias_D)

    D, of_rows = width, like(T, 1)
    bias_2F, residual_TD, of_D = (like(*s, dtype=dtype) for s in ((2, D), (T, D), (D,)))
    cases = (
        (gated, (like(T, 2, D, dtype=sums), of_rows, like(2, D), bias_2F)),
        (added, (like(T, D, dtype=sums), of_rows, like(D), residual_TD, of_D, of_D)),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return [jax.jit(run).lower(*operands).compile() for run, operands in cases]


def compile_peer_sum(mesh: Mesh, T: int, D: int) -> jax.stages.Compiled:
    sharding = NamedSharding(mesh, PartitionSpec())

    def like(shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    def layer(x_TD: jax.Array, where_N2: jax.Array, bias_D: jax.Array, scale_D: jax.Array) -> Any:
        rank = jax.lax.axis_index("x")
        added = {"bias_D": bias_D, "residual_TD": x_TD, "next_scale_D": scale_D}
        first = peer_sum(x_TD, Peers(where_N2, 0), rank, **added)
        return peer_sum(first.x, Peers(where_N2, 1), rank), first.half_normed

    on_all = jax.shard_map(
        layer, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    operands = like((T, D)), like((mesh.size, 2), "int32"), like((D,)), like((D,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(on_all).lower(*operands).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", default="h200", choices=["h200", "a100"])
    parser.add_argument("--names", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--steps", nargs="*", default=["8x8", "256x256", "2048x256"])
    parser.add_argument("--pages", help="dtype of pages of one byte; default: the queries'")
    parser.add_argument("--gib", type=int, help=f"of such pages; default: {POOL} pages")
    parser.add_argument("--rope-write", action="store_true", help="that kernel, not attention")
    parser.add_argument("--sampling", nargs="*", type=int, default=[], metavar="R", help="rows")
    parser.add_argument("--linear", nargs="*", type=int, default=[], metavar="T", help="rows")
    parser.add_argument("--quantized", nargs="*", type=int, default=[], metavar="T", help="rows")
    parser.add_argument("--rounded", nargs="*", type=int, default=[], metavar="T", help="rows")
    parser.add_argument("--peers", nargs="*", type=int, default=[], metavar="N", help="devices")
    args = parser.parse_args()
    mesh = h200_mesh(args.card)
    # This machine has no GPU to ask.
    dependents.is_supported = lambda: args.card == "h200"
    rounding.most_sharing = lambda: rounding.PER_CORE * mesh.devices.flat[0].core_count
    for N in args.peers:
        compile_peer_sum(h200_mesh(args.card, N), 64, 5120)
        print(f"compiled peer_sum {N}", flush=True)
    for R in args.sampling:
        temporary = compile_sampling(mesh, R).memory_analysis().temp_size_in_bytes
        print(f"compiled sampling {R}: {temporary} bytes", flush=True)
    for T, case in product(args.linear, LINEAR):
        compile_linear(mesh, T, *case)
        print(f"compiled linear {T} {case}", flush=True)
    # An A100 knows no e4m3: the engine refuses such weights there.
    known = [shape for shape in QUANTIZED if args.card == "h200" or "float8_e4m3fn" not in shape]
    for T, shape in product(args.quantized, known):
        compile_quantized(mesh, T, *shape)
        print(f"compiled quantized {T} {shape}", flush=True)
    for T, case in product(args.rounded, ROUNDED):
        compile_rounded(mesh, T, *case)
        print(f"compiled rounded {T} {case}", flush=True)
    for name, dtype, size in product(args.names, args.dtypes, args.steps):
        T, B = map(int, size.split("x"))
        shape = {**SHAPES[name], "pages": args.pages}
        if args.gib:
            shape["P"] = pages_of_one_byte(args.gib, **SHAPES[name])
        if args.rope_write:
            compiled = compile_rope_write(mesh, dtype, T, **shape)
        else:
            compiled = compile_step(mesh, dtype, T, B, T == B, **shape)
        temporary = compiled.memory_analysis().temp_size_in_bytes
        print(f"compiled {name} {dtype} {size}: {temporary} bytes", flush=True)


if __name__ == "__main__":
    main()
