from __future__ import annotations

import time
from typing import Any

import pytest

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.input_processor import InputProcessor
from jaxpaged.engine.messages import EngineInfo
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.sampling_params import SamplingParams

LIMIT, VOCAB = 64, 400


@pytest.fixture
def inputs(info: EngineInfo, tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(info, tokenizer)


def refusal(inputs: InputProcessor, prompt: Any, **options: Any) -> BadRequestError:
    params = {name: options.pop(name) for name in list(options) if name in PARAMS}
    with pytest.raises(BadRequestError) as error:
        inputs.request("r", prompt, SamplingParams(**params), **options)
    return error.value


PARAMS = SamplingParams.__dataclass_fields__


@pytest.mark.parametrize(
    "prompt", ["hello", {"prompt": "hello"}, {"prompt_token_ids": [0, 9]}, [0, 9], (0, 9)]
)
def test_every_form_of_a_prompt(inputs: InputProcessor, tokenizer: Tokenizer, prompt: Any):
    request = inputs.request("r", prompt, SamplingParams())
    text = prompt in ("hello", {"prompt": "hello"})
    assert request.prompt_token_ids == (tokenizer.encode("hello") if text else [0, 9])


def test_what_a_request_carries(inputs: InputProcessor, tokenizer: Tokenizer):
    params = SamplingParams(max_tokens=3)
    request = inputs.request("r", "hello", params, cache_salt="s", arrival_time=7.0)
    assert (request.request_id, request.cache_salt, request.arrival_time) == ("r", "s", 7.0)
    assert request.eos_token_ids == tokenizer.eos_token_ids
    assert request.params == params
    assert inputs.request("r", "x", SamplingParams(ignore_eos=True)).eos_token_ids == []
    assert time.time() - inputs.request("r", "x", SamplingParams()).arrival_time < 1


def test_max_tokens_is_what_fits(inputs: InputProcessor):
    free = SamplingParams(max_tokens=None)
    assert inputs.request("r", [5] * 10, free).params.max_tokens == LIMIT - 10
    assert inputs.request("r", [5] * 10, free, default_max_tokens=20).params.max_tokens == 20
    assert inputs.request("r", [5] * 60, free, default_max_tokens=20).params.max_tokens == 4
    assert inputs.request("r", [5] * 60, SamplingParams(max_tokens=4)).params.max_tokens == 4


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "said"),
    [
        (8, LIMIT - 3, [LIMIT, 8, LIMIT - 3, LIMIT + 5]),
        (LIMIT, 1, [LIMIT, 1, LIMIT + 1]),
        (LIMIT, None, [LIMIT, 1]),
        (1000, None, [LIMIT, 1000, 1]),
    ],
)
def test_too_long(inputs: InputProcessor, prompt_len: int, max_tokens: int | None, said: list[int]):
    message = refusal(inputs, [5] * prompt_len, max_tokens=max_tokens).message
    numbers = [int(word.strip(",.:")) for word in message.split() if word.strip(",.:").isdigit()]
    assert set(numbers) == set(said)
    assert f"maximum context length is {LIMIT} tokens" in message
    assert "Please reduce" in message
    assert "-" not in message


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1000])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids", "prompt"])
def test_ids_outside_the_vocabulary(inputs: InputProcessor, field: str, bad: int):
    if field == "prompt":
        error = refusal(inputs, [5, bad])
    else:
        value: Any = {bad: 1.0} if field == "logit_bias" else [5, bad]
        error = refusal(inputs, [5], **{field: value})
    assert error.param == field
    assert f"token id {bad}," in error.message
    assert f"0 to {VOCAB - 1}" in error.message


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_allowed(inputs: InputProcessor, field: str):
    error = refusal(inputs, "x", **{field: 21})
    assert (error.param, "21" in error.message, "20" in error.message) == (field, True, True)
    inputs.request("r", "x", SamplingParams(**{field: 20}))


@pytest.mark.parametrize("prompt", [[], {"prompt": None}, {}, [1, "a"], [True]])
def test_no_prompt_at_all(inputs: InputProcessor, prompt: Any):
    assert refusal(inputs, prompt).param == "prompt"


def test_an_empty_text_is_its_bos(inputs: InputProcessor):
    assert inputs.request("r", "", SamplingParams()).prompt_token_ids == [0]
    assert refusal(inputs, "", add_special_tokens=False).param == "prompt"


def test_truncation_keeps_the_end(inputs: InputProcessor):
    ids = list(range(4, 104))
    params = SamplingParams(max_tokens=1)
    cut = inputs.request("r", ids, params, truncate_prompt_tokens=3)
    assert cut.prompt_token_ids == ids[-3:]
    longest = inputs.request("r", ids, params, truncate_prompt_tokens=-1)
    assert longest.prompt_token_ids == ids[-(LIMIT - 1) :]
    for limit in (0, LIMIT, -2):
        assert refusal(inputs, ids, truncate_prompt_tokens=limit).param == "truncate_prompt_tokens"


def test_bad_words_at_a_start_and_within(inputs: InputProcessor, tokenizer: Tokenizer):
    request = inputs.request("r", "x", SamplingParams(bad_words=["brown"]))
    spelled = [tokenizer.decode(ids) for ids in request.bad_word_ids]
    assert spelled == ["brown", " brown"]
    lengths = [len(ids) for ids in request.bad_word_ids]
    assert lengths[0] > lengths[1], "the two are worth a test only if they differ"


def test_a_bad_word_is_not_forbidden_twice(inputs: InputProcessor, tokenizer: Tokenizer):
    request = inputs.request("r", "x", SamplingParams(bad_words=["日"]))
    assert [tokenizer.decode(ids) for ids in request.bad_word_ids] == ["日"]


def test_without_a_tokenizer(info: EngineInfo):
    inputs = InputProcessor(info, None)
    assert inputs.request("r", [5, 6], SamplingParams()).eos_token_ids == []
    assert "token ids" in refusal(inputs, "text").message
    assert "tokenizer" in refusal(inputs, [5], stop=["x"]).message


def test_stop_strings_need_text(inputs: InputProcessor):
    assert refusal(inputs, "x", stop=["x"], detokenize=False).param == "stop"


def test_min_tokens_must_fit(inputs: InputProcessor):
    assert refusal(inputs, [5] * 60, max_tokens=None, min_tokens=5).param == "min_tokens"
