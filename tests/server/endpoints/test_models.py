from __future__ import annotations

from pathlib import Path

import openai
from fake_core import MAX_MODEL_LEN
from fake_server import Server
from http_checks import check_error


def test_every_name_is_listed(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["M", "also"]
    assert client.models.retrieve("also").id == "also"


def test_a_card(server: Server, model_folder: Path):
    card = server.get("/v1/models/M").json()
    assert (card["object"], card["owned_by"]) == ("model", "jaxpaged")
    assert card["root"] == str(model_folder)
    assert card["max_model_len"] == MAX_MODEL_LEN


def test_an_unknown_model(server: Server):
    check_error(server.get("/v1/models/org/nope"), 404, "org/nope", "'M', 'also'")
