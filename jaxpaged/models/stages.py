"""Deals a model's layers out to the stages of a pipeline."""

from __future__ import annotations

from jaxpaged.models.spec import ModelSpec


def stage_layers(spec: ModelSpec, num_stages: int) -> list[range]:
    """The layers of each stage, in order, so that the slowest stage takes as little as it can.

    The last stage scores the vocabulary, too. A decode step reads every weight once, so its time is
    counted in weights: those of the head are worth some layers.

    Raises:
        ValueError: fewer layers than stages.
    """
    num_layers, others = len(spec.layers), num_stages - 1
    if num_layers < num_stages:
        raise ValueError(f"-pp {num_stages} is more than this model's {num_layers} layers")
    if others == 0:
        return [range(num_layers)]
    head = spec.vocab_rows * spec.width / _layer_weights(spec)

    def slowest(last: int) -> float:
        """In layers, if the last stage has `last` of them and the others share the rest."""
        return max(-(-(num_layers - last) // others), last + head)

    first_of_last = num_layers - min(range(num_layers - others, 0, -1), key=slowest)
    bounds = [stage * first_of_last // others for stage in range(num_stages)]
    return [range(*pair) for pair in zip(bounds, [*bounds[1:], num_layers], strict=True)]


def _layer_weights(spec: ModelSpec) -> int:
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads  # q and o, k and v
    return spec.width * (heads * spec.head_dim + 3 * spec.ffn)
