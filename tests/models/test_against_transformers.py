"""Every family against Hugging Face transformers, in float32 on the CPU: equal greedy tokens.

Two forms of the same test: live, where torch is installed, and against committed references
(scripts/make_fixtures.py wrote them) everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tiny_models
from paged_runner import PagedRunner
from safetensors.numpy import load_file

REFERENCES = Path(__file__).parents[1] / "fixtures" / "references.safetensors"
TOLERANCE = 1e-4

Generated = tuple[list[list[int]], list[np.ndarray]]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return pytest.importorskip("transformers_reference", reason="needs torch")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Generated]:
    """What our decoder generates from a tiny model; each is run once."""
    cache: dict[str, Generated] = {}

    def run(name: str) -> Generated:
        if name not in cache:
            folder = tmp_path_factory.mktemp(name)
            tiny_models.write_model(folder, tiny_models.CONFIGS[name])
            runner = PagedRunner.load(folder)
            cache[name] = runner.generate(tiny_models.prompts(), tiny_models.NEW_TOKENS)
        return cache[name]

    return run


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_committed_references(name: str, generated: Callable[[str], Generated]) -> None:
    references = load_file(REFERENCES)
    tokens, logits = generated(name)
    np.testing.assert_array_equal(tokens, references[f"{name}/tokens"])
    ends = np.stack([rows[[0, -1]] for rows in logits])
    np.testing.assert_allclose(ends, references[f"{name}/logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_live(
    name: str, reference: ModuleType, generated: Callable[[str], Generated], tmp_path: Path
) -> None:
    model = reference.load(tiny_models.write_model(tmp_path, tiny_models.CONFIGS[name]))
    compare(partial(reference.logits, model), *generated(name))


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_live_with_a_random_config(family: str, reference: ModuleType, tmp_path: Path) -> None:
    folder = tiny_models.write_model(tmp_path, tiny_models.random_config(family, seed=2))
    ours = PagedRunner.load(folder).generate(tiny_models.prompts(), tiny_models.NEW_TOKENS)
    compare(partial(reference.logits, reference.load(folder)), *ours)


def compare(
    reference_logits: Callable[[list[int]], np.ndarray],
    tokens: list[list[int]],
    logits: list[np.ndarray],
) -> None:
    """Fed our own tokens, transformers must score them alike and choose each of them too."""
    for prompt, ours, rows in zip(tiny_models.prompts(), tokens, logits, strict=True):
        expected = reference_logits(prompt + ours)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(rows, expected, atol=TOLERANCE, rtol=0)
        assert expected.argmax(-1).tolist() == ours
