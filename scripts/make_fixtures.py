"""Write tests/fixtures/references.safetensors: what transformers generates from the tiny models.

Run it after a change of tests/fixtures/tiny_models.py: `python scripts/make_fixtures.py`. Needs
torch and transformers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures"
sys.path.insert(0, str(FIXTURES))

import tiny_models  # noqa: E402
import transformers_reference as reference  # noqa: E402

CLEAR = 1e-4  # least gap between the two best logits: below it the choice is noise


def main() -> None:
    """Generate greedily from every tiny model and keep tokens and the first and last logits."""
    result: dict[str, np.ndarray] = {}
    for name, config in tiny_models.CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = reference.load(tiny_models.write_model(Path(folder), config))
            runs = [
                reference.greedy(model, prompt, tiny_models.NEW_TOKENS)
                for prompt in tiny_models.prompts()
            ]
        rows = np.stack([logits for _, logits in runs])
        best = np.sort(rows, axis=-1)[..., -2:]
        gap = float((best[..., 1] - best[..., 0]).min())
        distinct = len({token for tokens, _ in runs for token in tokens})
        print(f"{name}: least gap {gap:.1e}, {distinct} distinct tokens")
        if gap < CLEAR:
            sys.exit(f"{name}: two tokens are too close to tell apart; change its config")
        result[f"{name}/tokens"] = np.asarray([tokens for tokens, _ in runs], np.int32)
        result[f"{name}/logits"] = np.ascontiguousarray(rows[:, [0, -1]])  # a file needs C order
    save_file(result, FIXTURES / "references.safetensors")


if __name__ == "__main__":
    main()
