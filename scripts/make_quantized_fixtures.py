"""Write tests/fixtures/quantized.safetensors: a tiny model in every format, by its own tools.

Beside the quantized tensors stand the logits of transformers' model with the weights that those
tools make of them again. Needs torch, transformers, compressed-tensors and gptqmodel (for which
`pip install --no-build-isolation gptqmodel` with BUILD_CUDA_EXT=0 needs no GPU).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from gptqmodel import QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures"
sys.path.insert(0, str(FIXTURES))

import tiny_models  # noqa: E402
import transformers_reference as reference  # noqa: E402

CONFIG = tiny_models.QUANTIZED
GROUP = 32
Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, torch.Tensor]  # what is stored of a module, and its weight again
Write = Callable[[torch.Tensor], Made]
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
TOKEN = {**FP8, "strategy": "token", "dynamic": True}


def compressed(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> Write:
    """A module by compressed-tensors."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=args,
        input_activations=None if activations is None else QuantizationArgs(**activations),
    )
    compressor = BaseCompressor.get_value_from_registry(layout)

    def write(weight: torch.Tensor) -> Made:
        rows, terms = weight.shape
        strategy = weights["strategy"]
        if strategy == "block":
            parts = weight.reshape(rows // GROUP, GROUP, terms // GROUP, GROUP).transpose(1, 2)
            parts = parts.reshape(rows // GROUP, terms // GROUP, -1)
        else:
            parts = weight.reshape({"tensor": 1, "channel": rows, "group": rows}[strategy], -1)
            parts = parts.reshape(parts.shape[0], -1, GROUP if strategy == "group" else terms)
            parts = parts.reshape(1, 1, -1) if strategy == "tensor" else parts
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        scale = scale.reshape(1) if strategy == "tensor" else scale
        state = {"weight": weight, "weight_scale": scale}
        if not args.symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
        stored = compressor.compress(state, scheme)
        again = compressor.decompress(stored, scheme)["weight"]
        if activations is not None and not activations.get("dynamic"):
            stored["input_scale"] = torch.tensor([0.02])
        return stored, again

    return write


def compressed_settings(
    layout: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    """As llm-compressor writes them."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers\\.1\\..*"],
        "quantization_status": "compressed",
    }


def gptq(bits: int, sym: bool, desc_act: bool, version: int, group: int = GROUP) -> Write:
    """A module by gptqmodel; with desc_act its groups are a permutation's."""

    def write(weight: torch.Tensor) -> Made:
        rows, terms = weight.shape
        size = terms if group == -1 else group
        g_idx = torch.arange(terms) // size
        if desc_act:
            g_idx = g_idx[torch.from_numpy(np.random.RandomState(terms).permutation(terms))]
        order = torch.argsort(g_idx, stable=True)
        parts = weight[:, order].reshape(rows, -1, size)
        scale, zero = affine(parts, bits, sym)
        linear = torch.nn.Linear(terms, rows, bias=False)
        linear.weight.data = weight
        module = TorchLinear(
            bits=bits, group_size=group, sym=sym, desc_act=desc_act,
            in_features=terms, out_features=rows, bias=False,
        )  # fmt: skip
        module.pack_original(linear, scale, zero, g_idx.to(torch.int32))
        module.post_init()
        module.scales = module.scales.float()
        again = module.dequantize_weight().float().T
        if version == 1:
            convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=bits))
        names = ("qweight", "qzeros", "g_idx")
        stored = {name: getattr(module, name).clone() for name in names}
        return {**stored, "scales": module.scales.half()}, again

    return write


def awq(group: int) -> Write:
    """A module by gptqmodel's AWQ."""

    def write(weight: torch.Tensor) -> Made:
        rows, terms = weight.shape
        size = terms if group == -1 else group
        scale, zero = affine(weight.reshape(rows, -1, size), 4, False)
        linear = torch.nn.Linear(terms, rows, bias=False)
        linear.weight.data = weight
        module = AwqTorchLinear(
            bits=4, group_size=group, sym=False, desc_act=False,
            in_features=terms, out_features=rows, bias=False,
        )  # fmt: skip
        module.pack(linear, scale.half(), zero.half())
        stored = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}
        words = stored["qweight"], stored["qzeros"]
        return stored, dequantize_gemm(*words, stored["scales"].float(), 4, size).T

    return write


def affine(parts: torch.Tensor, bits: int, sym: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, exact in float16, and zero points of groups [rows, groups, terms]."""
    largest, high, low = 2**bits - 1, parts.amax(-1), parts.amin(-1)
    if sym:
        scale = (parts.abs().amax(-1) * 2 / (largest - 1)).half().float()
        return scale, torch.full_like(scale, 2 ** (bits - 1))
    # One step is left for the zero point's rounding: the writers don't clip.
    scale = ((high.clamp(min=0) - low.clamp(max=0)) / (largest - 1)).half().float()
    return scale, torch.clamp(torch.round(-low / scale), 1, largest)


def float8_blocks(weight: torch.Tensor) -> Made:
    """As DeepSeek's and Qwen's checkpoints have it: transformers' own quantizer does the same."""
    stored, again = compressed("float-quantized", BLOCKS, TOKEN)(weight)
    return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}, again


def float8_whole(weight: torch.Tensor) -> Made:
    """A matrix smaller than a block: its scales are [1, 1]."""
    stored, again = compressed("float-quantized", {**FP8, "strategy": "tensor"}, TOKEN)(weight)
    scale = stored["weight_scale"].reshape(1, 1)
    return {"weight": stored["weight"], "weight_scale_inv": scale}, again


def float8_static(weight: torch.Tensor) -> Made:
    """One scale a tensor, and one of activations."""
    stored, again = compressed("float-quantized", {**FP8, "strategy": "tensor"}, TOKEN)(weight)
    scales = {"weight_scale": stored["weight_scale"][0], "input_scale": torch.tensor(0.02)}
    return {"weight": stored["weight"], **scales}, again


def float8_transformers(weight: torch.Tensor) -> Made:
    """The same under transformers' names, which dequantizes it."""
    stored, _ = float8_static(weight)
    e4m3, scale = stored["weight"], stored["weight_scale"]
    scales = {"weight_scale_inv": scale, "activation_scale": stored["input_scale"]}
    return {"weight": e4m3, **scales}, _dequantize_fp8_weight(e4m3, scale, None, torch.float32)


def settings(method: str, **rest: Any) -> dict[str, Any]:
    """quantization_config that leaves the second layer as it is."""
    return {"quant_method": method, **rest}


BLOCKS = {**FP8, "strategy": "block", "block_structure": [GROUP, GROUP]}
GROUPS = {"strategy": "group", "group_size": GROUP}
INT4 = {"num_bits": 4, "type": "int", **GROUPS}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "fp8 channel": ("float-quantized", {**FP8, "strategy": "channel"}, TOKEN),
    "fp8 tensor": ("float-quantized", {**FP8, "strategy": "tensor"}, {**FP8, "strategy": "tensor"}),
    "fp8 block": ("float-quantized", BLOCKS, TOKEN),
    "fp8 groups": ("float-quantized", {**FP8, **GROUPS}, None),
    "fp8 weights": ("float-quantized", {**FP8, "strategy": "channel"}, None),
    "int8": ("int-quantized", INT8, {**INT8, "strategy": "token", "dynamic": True}),
    "int8 packed": ("pack-quantized", INT8, None),
    "int8 packed groups": ("pack-quantized", {**INT8, **GROUPS}, None),
    "int8 zeros": ("int-quantized", {**INT8, "symmetric": False}, None),
    "int4": ("pack-quantized", {**INT4, "symmetric": True}, None),
    "int4 zeros": ("pack-quantized", {**INT4, "symmetric": False}, None),
}
PLAIN = ["model.layers.1", "lm_head"]
FORMATS: dict[str, tuple[dict[str, Any], Write]] = {
    **{
        f"compressed-tensors {name}": (compressed_settings(*case), compressed(*case))
        for name, case in COMPRESSED.items()
    },
    "fp8 block": (
        settings("fp8", weight_block_size=[GROUP, GROUP], modules_to_not_convert=PLAIN),
        float8_blocks,
    ),
    "fp8 block 128": (
        settings("fp8", weight_block_size=[128, 128], modules_to_not_convert=PLAIN),
        float8_whole,
    ),
    "fp8 static": (
        settings("fp8", activation_scheme="static", ignored_layers=PLAIN),
        float8_static,
    ),
    "fp8 static transformers": (
        settings("fp8", weight_block_size=None, modules_to_not_convert=PLAIN),
        float8_transformers,
    ),
    "modelopt": (
        settings("modelopt", quant_algo="FP8", ignore=["model.layers.1*", "lm_head"]),
        float8_static,
    ),
    **{
        name: (
            settings(
                "awq", bits=4, group_size=group, zero_point=True, version="gemm",
                modules_to_not_convert=PLAIN,
            ),
            awq(group),
        )
        for name, group in (("awq", GROUP), ("awq whole", -1))
    },
    **{
        f"gptq {name}": (
            settings(
                "gptq", bits=bits, sym=sym, desc_act=desc_act, group_size=group,
                checkpoint_format="gptq" if version == 1 else "gptq_v2",
                dynamic={"-:.*layers\\.1\\..*": {}},
            ),
            gptq(bits, sym, desc_act, version, group),
        )
        for name, bits, sym, desc_act, version, group in (
            ("4", 4, True, False, 1, GROUP),
            ("4 desc_act zeros", 4, False, True, 1, GROUP),
            ("4 v2 desc_act", 4, True, True, 2, GROUP),
            ("8", 8, True, False, 1, GROUP),
            ("8 desc_act", 8, True, True, 1, GROUP),
            ("8 v2 zeros", 8, False, False, 2, -1),
        )
    },
}  # fmt: skip


def main() -> None:
    """Quantize the first layer in every format."""
    result: Tensors = {}
    for name, (_, write) in FORMATS.items():
        tensors = {n: torch.from_numpy(x) for n, x in tiny_models.tensors(CONFIG).items()}
        for key in [key for key in tensors if ".layers.0." in key and "proj.weight" in key]:
            module = key.removesuffix("weight")
            stored, tensors[key] = write(tensors[key])
            result |= {f"{name}/{module}{kind}": x.contiguous() for kind, x in stored.items()}
            error = (tensors[key] - torch.from_numpy(tiny_models.tensors(CONFIG)[key])).abs().max()
            assert error < 0.1, (name, key, error)
        with tempfile.TemporaryDirectory() as folder:
            tiny_models.write_model(Path(folder), CONFIG)
            dense = {n: x.float().contiguous() for n, x in tensors.items()}
            save_file(dense, Path(folder) / "model.safetensors", {"format": "pt"})
            model = reference.load(Path(folder))
            rows = [reference.logits(model, prompt)[-1] for prompt in tiny_models.prompts()]
        result[f"{name}/logits"] = torch.from_numpy(np.stack(rows))
        print(name, {kind: tuple(x.shape) for kind, x in stored.items()}, flush=True)
    metadata = {name: json.dumps(found) for name, (found, _) in FORMATS.items()}
    save_file(result, FIXTURES / "quantized.safetensors", metadata)


if __name__ == "__main__":
    main()
