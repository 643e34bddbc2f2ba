from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_tokenizer import ASSISTANT, BOS, END, USER

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.tokenizer import LONG, Tokenizer, generation_defaults

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))


def test_a_text_gets_one_bos(tokenizer: Tokenizer):
    assert tokenizer.encode("hello").count(BOS) == 1
    assert BOS not in tokenizer.encode("hello", add_special_tokens=False)


def test_a_long_text_there_and_back(tokenizer: Tokenizer):
    text = "hello the quick 😀 " * 200
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(token_ids) > LONG
    assert tokenizer.decode(token_ids) == text


def test_a_long_text_lets_other_threads_run(tokenizer: Tokenizer):
    """The event loop's thread among them."""
    ticks, done = 0, threading.Event()

    def encode():
        tokenizer.encode("hello the quick " * 100_000)
        done.set()

    threading.Thread(target=encode).start()
    while not done.wait(0.001):
        ticks += 1
    assert ticks > 20


def test_a_chat_gets_one_bos_from_its_template(tokenizer: Tokenizer):
    text = tokenizer.render_chat(HELLO)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids[:2] == [BOS, USER]
    assert token_ids[-2:] == [END, ASSISTANT]
    assert token_ids.count(BOS) == 1


def test_the_last_message_can_be_continued(tokenizer: Tokenizer):
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    text = tokenizer.render_chat(begun, continue_final_message=True)
    assert text.endswith("<|assistant|>I am")


def test_template_variables_and_another_template(tokenizer: Tokenizer):
    assert tokenizer.render_chat(HELLO, shout="AH").endswith("AH")
    assert tokenizer.render_chat(HELLO, chat_template="{{ messages|length }}") == "1"


def test_a_template_refuses_in_its_own_words(tokenizer: Tokenizer):
    with pytest.raises(BadRequestError, match="no such role: robot"):
        tokenizer.render_chat([{"role": "robot", "content": "x"}])


@pytest.mark.parametrize(
    "template", ["{{ x.y.z }}", "{% if %}", "{{ ''.__class__.__mro__ }}", "{{ 1/0 }}"]
)
def test_a_broken_template_is_the_requests_fault(tokenizer: Tokenizer, template: str):
    with pytest.raises(BadRequestError):
        tokenizer.render_chat(HELLO, chat_template=template)


def test_no_template(folder: Path):
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    with pytest.raises(BadRequestError, match="no chat template"):
        Tokenizer.load(folder).render_chat(HELLO)


@pytest.mark.parametrize(("named", "ids"), [(7, [END, 7]), ([7, 9, END], [END, 7, 9])])
def test_ends_of_a_text_come_from_generation_config_too(folder: Path, named: object, ids: list):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert Tokenizer.load(folder).eos_token_ids == ids


def test_ends_of_a_text_come_from_the_models_folder(folder: Path, tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert Tokenizer.load(folder, tmp_path).eos_token_ids == [END, 5]


def test_generation_defaults(tmp_path: Path):
    assert generation_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "top_p": null}')
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    file.write_text('{"do_sample": false, "temperature": 0.6}')
    assert generation_defaults(tmp_path) == {"temperature": 0.0}


def test_a_token_reads_as_in_the_middle_of_a_text(byte_fallback: Tokenizer):
    word = byte_fallback.encode("hel", add_special_tokens=False)
    assert [byte_fallback.token_text(token_id) for token_id in word] == [" hel"]


@pytest.mark.parametrize("name", ["tokenizer", "byte_fallback"])
def test_bytes_of_tokens_join_to_the_text(name: str, request: pytest.FixtureRequest):
    tokenizer: Tokenizer = request.getfixturevalue(name)
    text = "hello ď 👨‍👩‍👧"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    raw = bytes(byte for token_id in token_ids for byte in tokenizer.token_bytes(token_id))
    assert raw.decode().lstrip() == text


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(OSError, match=str(tmp_path)) as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_loading_is_silent(tokenizer_folder: Path):
    hide = "import sys; sys.modules['torch'] = None; "
    code = "from pathlib import Path; from jaxpaged.engine.tokenizer import Tokenizer; "
    load = f"Tokenizer.load(Path({str(tokenizer_folder)!r}))"
    command = [sys.executable, "-c", hide + code + load]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
