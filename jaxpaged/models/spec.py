"""What a decoder model is made of: everything that `decoder.py` needs to know about a family."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxpaged.layers.rope import RopeSpec
from jaxpaged.quantization import FullPrecision, Quantized, Scheme

PRODUCTS = ("qkv", "o", "gate_up", "down")  # of a layer
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")  # as Hugging Face names them


class UnsupportedModelError(ValueError):
    """A model that no family here can run; the message names what was found and what would do."""


@dataclass(frozen=True)
class LayerQuantization:
    """How a layer's products store their kernels; None: in the model's dtype."""

    qkv: Quantized | None = None
    o: Quantized | None = None
    gate_up: Quantized | None = None
    down: Quantized | None = None

    @property
    def made_while_loading(self) -> bool:
        """Whether the checkpoint has ordinary weights all the same."""
        return any(isinstance(how.source, FullPrecision) for how in self.found)

    @property
    def found(self) -> tuple[Quantized, ...]:
        """Those that there are."""
        hows = (getattr(self, product) for product in PRODUCTS)
        return tuple(how for how in hows if how is not None)


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    window: int | None  # tokens a query sees, itself included; None: all
    rope: RopeSpec
    quantization: LayerQuantization = LayerQuantization()


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of a decoder. Hashable: part of the key of every compiled step."""

    architecture: str  # as config.json spells it
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    vocab: int  # V
    width: int  # D
    ffn: int  # F
    num_heads: int  # N
    num_kv_heads: int  # K, copies included
    head_dim: int  # H
    layers: tuple[LayerSpec, ...]
    max_position: int  # longest context the model was made for
    eos_token_ids: tuple[int, ...]

    attention_scale: float  # multiplies q·k
    norm_eps: float
    norm_plus_one: bool = False  # norms multiply by 1 + scale
    activation: str = "silu"  # one of ACTIVATIONS
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised per head before RoPE
    post_norms: bool = False  # attention and MLP outputs are normalised too
    embed_scale: float | None = None  # embeddings are multiplied by this, rounded to their dtype
    final_softcap: float | None = None  # logits become cap * tanh(logit / cap)
    tie_embeddings: bool = False  # the embedding table is the head as well
    head: Quantized | None = None  # how a matrix of the head's own is stored; None: as tables are

    # What `spread.spread_spec` adds where devices share the model; a checkpoint has none of it.
    kv_copies: int = 1  # of each KV head, side by side; each serves a part of its queries
    vocab_padding: int = 0  # rows after the vocabulary, never looked up and never sampled

    @property
    def queries_per_kv_head(self) -> int:
        """G."""
        return self.num_heads // self.num_kv_heads

    @property
    def stored(self) -> ModelSpec:
        """The model as a checkpoint has it."""
        return replace(
            self, num_kv_heads=self.num_kv_heads // self.kv_copies, kv_copies=1, vocab_padding=0
        )

    def quantized(self, leaf: str) -> Quantized | None:
        """How the product is stored that `leaf` (a path in the parameter tree) is of."""
        layer, _, rest = leaf.partition("/")
        if layer == "lm_head":
            return self.head
        product = rest.split("/")[-2] if "/" in rest else ""
        if not layer.startswith("layers_") or product not in PRODUCTS:
            return None
        return getattr(self.layers[int(layer.removeprefix("layers_"))].quantization, product)

    @property
    def schemes(self) -> frozenset[Scheme]:
        """How its products are stored, where they are quantized."""
        hows = [getattr(layer.quantization, name) for layer in self.layers for name in PRODUCTS]
        return frozenset(how.scheme for how in (*hows, self.head) if how is not None)

    @property
    def rounds_activations(self) -> bool:
        """Whether any product does."""
        hows = (how for layer in self.layers for how in layer.quantization.found)
        return any(how.scheme.rounds_rows for how in hows)

    def quantized_like(self, how: Quantized) -> ModelSpec:
        """The model with every product of its layers stored in one way."""
        same = LayerQuantization(**dict.fromkeys(PRODUCTS, how))
        return replace(
            self, layers=tuple(replace(layer, quantization=same) for layer in self.layers)
        )

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding table and of the head."""
        return self.vocab + self.vocab_padding
