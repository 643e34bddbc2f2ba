from __future__ import annotations

from fake_core import MAX_MODEL_LEN, VOCAB
from fake_server import Server
from http_checks import check_error
from tiny_tokenizer import ASSISTANT, BOS, USER

from jaxpaged.engine.tokenizer import ALWAYS_TOKENIZED


def test_a_text_there_and_back(server: Server):
    found = server.post("/tokenize", model="M", prompt="hello 😀").json()
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), MAX_MODEL_LEN)
    assert "token_strs" not in found
    back = server.post("/detokenize", tokens=found["tokens"]).json()
    assert back == {"prompt": "<|bos|>hello 😀"}


def test_special_tokens_are_optional(server: Server):
    ids = server.post("/tokenize", prompt="hello", add_special_tokens=False).json()["tokens"]
    assert BOS not in ids


def test_spellings(server: Server):
    found = server.post("/tokenize", prompt="the quick", return_token_strs=True).json()
    assert found["token_strs"] == ["<|bos|>", "the", "Ġquick"]


def test_a_chat(server: Server):
    messages = [{"role": "user", "content": "hello"}]
    ids = server.post("/tokenize", messages=messages).json()["tokens"]
    assert ids[:2] == [BOS, USER]
    assert ids[-1] == ASSISTANT
    without = server.post("/tokenize", messages=messages, add_generation_prompt=False)
    assert without.json()["tokens"] == ids[:-1]


def test_bad_requests(server: Server):
    check_error(server.post("/tokenize"), 400, "prompt", "messages")
    check_error(server.post("/tokenize", model="nope", prompt="x"), 404, "nope")
    bad = server.post("/detokenize", tokens=[5, VOCAB])
    check_error(bad, 400, f"{VOCAB}", f"{VOCAB - 1}", param="tokens")
    robot = [{"role": "robot", "content": "x"}]
    check_error(server.post("/tokenize", messages=robot), 400, "no such role")


def test_a_text_that_would_take_the_tokenizer_minutes(server: Server):
    text = "x" * (ALWAYS_TOKENIZED + 1)
    chat = [{"role": "user", "content": text}]
    for path, body in (
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": chat}),
        ("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 5}),
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/embeddings", {"input": [text]}),
    ):
        limits = (f"{MAX_MODEL_LEN} tokens", f"more than {ALWAYS_TOKENIZED} characters")
        check_error(server.post(path, **body), 400, *limits, "reduce")
