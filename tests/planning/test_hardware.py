from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.model_files import ModelFilesError
from jaxpaged.planning.hardware import CALIBRATIONS, GPUS, Calibration, parse_gpus
from jaxpaged.planning.options import PlanOptions


def test_gpus_are_read() -> None:
    assert parse_gpus("H200:8") == (GPUS["H200"], 8)
    assert parse_gpus("a100-80") == (GPUS["A100-80"], 1)


@pytest.mark.parametrize("text", ["", "H300:8", "H200:0", "H200:x", "H200:", "8"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--gpus"):
        parse_gpus(text)


def test_every_card_tells_its_source_and_is_offered() -> None:
    text = PlanOptions.__dataclass_fields__["gpus"].metadata["help"]
    for name, gpu in GPUS.items():
        assert gpu.name == name and gpu.source and name in text
        assert gpu.flops(1) > gpu.flops(2) > gpu.flops(4)


def test_what_was_not_measured_borrows_from_the_reference() -> None:
    assert Calibration.of(GPUS["B200"]) == Calibration.of(GPUS["H200"])


def test_shares_are_shares(h200: Calibration) -> None:
    for name, figure in vars(h200).items():
        if name.endswith("_share"):
            assert 0 < figure <= 1
        elif name != "gpu":
            assert figure > 0
    content = json.loads((CALIBRATIONS / "h200.json").read_text())
    told = ", ".join(content["sources"]).split(", ")
    assert sorted(told) == sorted(content["coefficients"])
    assert content["fitted"]


def test_calibration_files_that_do_not_serve(h200: Calibration, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="missing"):
        Calibration.load(tmp_path / "none.json")
    figures, file = dataclasses.asdict(h200), tmp_path / "part.json"
    gpu = figures.pop("gpu")
    for name in figures:
        rest = {other: value for other, value in figures.items() if other != name}
        file.write_text(json.dumps({"gpu": gpu, "coefficients": rest}))
        with pytest.raises(ValueError, match=f"part.json lacks {name}: run"):
            Calibration.load(file)


@pytest.mark.parametrize(
    ("figure", "values", "words"),
    [
        ("weight_share", ("fast", None, True, 0, -1, 2, float("nan"), [0.9]), "from 1e-06 to 1,"),
        ("int4_share", (0, 1.5), "from 1e-06 to 1,"),
        ("overlap", (0.5, 1000), "from 1 to 100,"),
        ("layer_us", (-1, float("inf")), "from 0 to 1e\\+09,"),
    ],
)
def test_figures_that_no_card_has_are_refused(
    h200: Calibration, tmp_path: Path, figure: str, values: tuple[Any, ...], words: str
) -> None:
    figures, file = dataclasses.asdict(h200), tmp_path / "figures.json"
    gpu = figures.pop("gpu")
    for value in values:
        file.write_text(json.dumps({"gpu": gpu, "coefficients": figures | {figure: value}}))
        with pytest.raises(ValueError, match=f"{figure} must be a number {words}"):
            Calibration.load(file)


@pytest.mark.parametrize("content", ["{}", '{"gpu": 1, "coefficients": {}}', '{"gpu": "H200"}'])
def test_a_calibration_has_its_card_and_figures(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(ValueError, match='must have a "gpu" and "coefficients"'):
        Calibration.load(tmp_path / "c.json")
