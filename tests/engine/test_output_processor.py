from __future__ import annotations

from typing import Any

import pytest

from jaxpaged.engine.errors import BadRequestError, RequestFailedError
from jaxpaged.engine.messages import AddRequest, FinishSequence, SequenceOutput, TokenLogprobs
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams

END = 1


class Driver:
    """A processor with one request, fed token by token."""

    def __init__(self, tokenizer: Tokenizer | None, delta: bool, **params: Any) -> None:
        self.outputs = OutputProcessor(tokenizer)
        request = AddRequest(
            request_id="r",
            prompt_token_ids=[0, 50],
            params=SamplingParams(**params),
            arrival_time=0.0,
        )
        self.outputs.add(request, "prompt", delta=delta)
        self.told: list[FinishSequence] = []

    def feed(self, token_ids: list[int], index: int = 0, **news: Any) -> RequestOutput | None:
        output, tell = self.outputs.process(
            SequenceOutput(request_id="r", index=index, token_ids=token_ids, **news)
        )
        self.told += [tell] if tell is not None else []
        return output

    def feed_text(self, token_ids: list[int], **last: Any) -> list[RequestOutput]:
        """One token at a time; the news of the last one carry `last`."""
        found = []
        for token_id in token_ids[:-1]:
            found.append(self.feed([token_id]))
        found.append(self.feed(token_ids[-1:], **last))
        return [output for output in found if output is not None]


@pytest.fixture
def ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("hello world 😀!", add_special_tokens=False)


def test_deltas_join_to_what_cumulative_gives(tokenizer: Tokenizer, ids: list[int]):
    deltas = Driver(tokenizer, True).feed_text(ids, finish_reason="length")
    text = "".join(output.outputs[0].text for output in deltas)
    tokens = [token_id for output in deltas for token_id in output.outputs[0].token_ids]
    whole = Driver(tokenizer, False).feed_text(ids, finish_reason="length")[-1]
    assert whole.outputs[0].text == text == "hello world 😀!"
    assert whole.outputs[0].token_ids == tokens == ids
    assert [output.finished for output in deltas] == [False] * (len(ids) - 1) + [True]
    assert whole.outputs[0].finish_reason == deltas[-1].outputs[0].finish_reason == "length"
    assert (whole.prompt, whole.prompt_token_ids) == ("prompt", [0, 50])


def test_the_whole_is_one_object_that_grows():
    driver = Driver(None, False, logprobs=0)
    found = [
        driver.feed([token_id], logprobs=[TokenLogprobs(token_id, -1.0, 1, [], [])])
        for token_id in (5, 6)
    ]
    last = driver.feed([], finish_reason="abort")
    assert found[0] is found[1] is last and last.finished
    (choice,) = last.outputs
    assert (choice.token_ids, choice.finish_reason) == ([5, 6], "abort")
    assert ([list(entry) for entry in choice.logprobs], choice.cumulative_logprob) == (
        [[5], [6]],
        -2,
    )


def test_the_end_token_counts_but_is_not_shown(tokenizer: Tokenizer, ids: list[int]):
    last = Driver(tokenizer, False).feed_text([*ids, END], finish_reason="stop")[-1].outputs[0]
    assert (last.text, last.token_ids[-1]) == ("hello world 😀!", END)
    assert (last.finish_reason, last.stop_reason) == ("stop", None)


@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_token_is_shown_if_asked_for(tokenizer: Tokenizer, ids: list[int], shown: bool):
    driver = Driver(tokenizer, False, include_stop_str_in_output=shown)
    last = driver.feed_text(ids, finish_reason="stop", stop_reason=ids[-1])[-1].outputs[0]
    assert last.text == ("hello world 😀!" if shown else "hello world 😀")
    assert last.stop_reason == ids[-1]


def test_a_stop_string_ends_the_choice_and_tells_the_engine(tokenizer: Tokenizer, ids: list[int]):
    driver = Driver(tokenizer, False, stop=["o wor"], logprobs=0)
    found = []
    for token_id in ids:
        entry = TokenLogprobs(token_id, -1.0, 1, [], [])
        found.append(driver.feed([token_id], logprobs=[entry]))
    last = [output for output in found if output is not None][-1]
    choice = last.outputs[0]
    used = len(choice.token_ids)
    assert last.finished
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("hell", "stop", "o wor")
    assert driver.told == [FinishSequence("r", 0, used)]
    assert (
        tokenizer.decode(ids[: used - 1]).find("o wor")
        < 0
        <= tokenizer.decode(ids[:used]).find("o wor")
    )
    assert choice.cumulative_logprob == -used
    assert len(choice.logprobs or []) == used
    assert found[used:] == [None] * (len(ids) - used), "late news are dropped"
    assert driver.outputs.num_requests == 0


def test_tokens_behind_a_stop_string_are_cut(tokenizer: Tokenizer, ids: list[int]):
    driver = Driver(tokenizer, False, stop=["hello"])
    choice = driver.feed(ids, finish_reason="length").outputs[0]
    assert (choice.text, choice.finish_reason) == ("", "stop")
    assert tokenizer.decode(choice.token_ids) == "hello"
    assert len(driver.told) == 1


def test_a_stop_string_at_the_very_end_needs_no_word_to_the_engine(tokenizer: Tokenizer):
    ids = tokenizer.encode("hello", add_special_tokens=False)
    driver = Driver(tokenizer, False, stop=["lo"])
    choice = driver.feed_text(ids, finish_reason="length")[-1].outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("hel", "stop", "lo")
    assert driver.told == []


@pytest.mark.parametrize("delta", [True, False])
def test_choices_are_apart(tokenizer: Tokenizer, ids: list[int], delta: bool):
    driver = Driver(tokenizer, delta, n=2)
    assert not driver.feed(ids[:2], index=1, finish_reason="length").finished
    last = driver.feed(ids[:1], index=0, finish_reason="stop")
    assert last.finished
    assert [choice.index for choice in last.outputs] == ([0] if delta else [0, 1])
    if not delta:
        assert [choice.finish_reason for choice in last.outputs] == ["stop", "length"]


def test_logprobs_hold_the_token_and_the_likeliest(tokenizer: Tokenizer, ids: list[int]):
    driver = Driver(tokenizer, True, logprobs=2)
    raw = TokenLogprobs(ids[0], -3.0, 9, [60, 61], [-0.5, -1.5])
    choice = driver.feed(ids[:1], logprobs=[raw]).outputs[0]
    assert [list(entry) for entry in choice.logprobs] == [[ids[0], 60, 61]]
    entry = choice.logprobs[0]
    assert (entry[ids[0]].rank, entry[ids[0]].decoded_token) == (9, tokenizer.token_text(ids[0]))
    assert (entry[61].rank, entry[61].logprob) == (2, -1.5)
    assert choice.cumulative_logprob == -3.0


def test_what_comes_once_stays(tokenizer: Tokenizer, ids: list[int]):
    driver = Driver(tokenizer, False, prompt_logprobs=1)
    raw = TokenLogprobs(50, -1.0, 1, [50], [-1.0])
    once = {"prompt_logprobs": [None, raw], "num_cached_tokens": 16, "scheduled_time": 3.0}
    driver.feed(ids[:1], **once)
    last = driver.feed(ids[1:2], finish_reason="length")
    assert (last.num_cached_tokens, last.scheduled_time) == (16, 3.0)
    assert last.prompt_logprobs[0] is None
    assert last.prompt_logprobs[1][50].logprob == -1.0


def test_a_refused_request_fails(tokenizer: Tokenizer):
    driver = Driver(tokenizer, True)
    with pytest.raises(RequestFailedError, match="full") as error:
        driver.feed([], finish_reason="error", error="full", error_code=503)
    assert error.value.code == 503
    assert driver.outputs.num_requests == 0


def test_a_request_that_proves_bad_names_its_field(tokenizer: Tokenizer):
    driver = Driver(tokenizer, True)
    with pytest.raises(BadRequestError, match="no token fits") as error:
        driver.feed(
            [], finish_reason="error", error="no token fits", error_code=400, error_param="p"
        )
    assert error.value.param == "p"


def test_an_aborted_request_is_forgotten(tokenizer: Tokenizer, ids: list[int]):
    driver = Driver(tokenizer, True)
    driver.outputs.abort("r")
    assert driver.feed(ids) is None


@pytest.mark.parametrize("silent", [{"detokenize": False}, {}])
def test_no_text(tokenizer: Tokenizer, ids: list[int], silent: dict):
    driver = Driver(tokenizer if silent else None, False, **silent)
    choice = driver.feed(ids, finish_reason="length").outputs[0]
    assert (choice.text, choice.token_ids) == ("", ids)
