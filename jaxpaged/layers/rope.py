"""Rotary position embedding and the ways to stretch it over longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Kinds of scaling, and the parameters that each cannot do without.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class RopeSpec:
    """Rotation of a head's two halves: pair i turns by position * frequency i."""

    head_dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0  # how much longer the context has become
    original_max_position: int = 0  # context length before stretching (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: pairs with more turns in the original context stay
    beta_slow: float = 1.0  # yarn: pairs with fewer are slowed by the whole factor
    truncate: bool = True  # yarn: round those bounds to whole pairs
    magnitude: float = 1.0  # yarn: multiplies cos and sin

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, Any], head_dim: int, max_position: int
    ) -> RopeSpec:
        """Read Hugging Face's `rope_parameters` (or `rope_scaling` with a `rope_theta` added).

        Raises:
            ValueError: a kind of scaling that is not among `NEEDED`, or a missing number.
        """
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in NEEDED:
            raise ValueError(
                f"RoPE scaling {kind!r} is not supported; supported: {', '.join(NEEDED)}"
            )
        original = parameters.get("original_max_position_embeddings") or max_position
        given = {key: value for key, value in parameters.items() if value is not None}
        if kind == "yarn":
            given.setdefault("factor", max_position / original)
        for key in NEEDED[kind]:
            if key not in given:
                raise ValueError(f"RoPE scaling {kind!r} lacks {key!r}")
        spec = cls(head_dim, float(given["rope_theta"]), kind)
        if kind == "default":
            return spec
        spec = replace(spec, factor=float(given["factor"]), original_max_position=original)
        if kind == "llama3":
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            return replace(spec, low_freq_factor=float(low), high_freq_factor=float(high))
        if kind == "yarn":
            return replace(
                spec,
                beta_fast=float(given.get("beta_fast") or 32),
                beta_slow=float(given.get("beta_slow") or 1),
                truncate=given.get("truncate", True),
                magnitude=_yarn_magnitude(given, spec.factor),
            )
        return spec

    def frequencies(self) -> np.ndarray:
        """Radians a position of each pair: float32 [H / 2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        plain = 1 / np.float32(self.theta) ** exponents
        slowed = plain / np.float32(self.factor)
        if self.kind == "linear":
            return slowed
        if self.kind == "llama3":
            return self._llama3(plain, slowed)
        if self.kind == "yarn":
            keep = 1 - self._yarn_ramp(len(plain))
            return slowed * (1 - keep) + plain * keep
        return plain

    def _llama3(self, plain: np.ndarray, slowed: np.ndarray) -> np.ndarray:
        """Slow down long waves, keep short ones, blend between. Source: Llama 3.1."""
        turns = self.original_max_position * plain / np.float32(2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = np.clip((turns - self.low_freq_factor) / span, 0, 1).astype(np.float32)
        return slowed * (1 - keep) + plain * keep

    def _yarn_ramp(self, pairs: int) -> np.ndarray:
        """0 for pairs that stay, 1 for pairs slowed by the whole factor. Source: YaRN, eq. 23."""

        def pair_with(turns: float) -> float:
            wavelength = self.original_max_position / (turns * 2 * math.pi)
            return self.head_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        if low == high:
            high += 0.001
        ramp = (np.arange(pairs, dtype=np.float32) - low) / (high - low)
        return np.clip(ramp, 0, 1).astype(np.float32)


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])
    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if weight and weight_all:
        return mscale(weight) / mscale(weight_all)
    return mscale(1.0)


def rope_tables(spec: RopeSpec, position_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every pair's angle, float32 [T, H / 2] each."""
    angle = position_T.astype(jnp.float32)[:, None] * spec.frequencies()
    return jnp.cos(angle) * spec.magnitude, jnp.sin(angle) * spec.magnitude
