"""The Python API on the built-in model."""

from __future__ import annotations

import random
from collections.abc import Iterator

import jax
import pytest
from jax import monitoring

from jaxpaged import LLM, SamplingParams
from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.messages import SequenceOutput

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = "To be, or not to be"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512) as llm:
        yield llm


def test_prompts_of_every_kind(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPT)
    kinds = [PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}]
    outputs = llm.generate(kinds, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [PROMPT, None, PROMPT, None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert all(output.finished for output in outputs)
    for single in (PROMPT, ids):
        (output,) = llm.generate(single, GREEDY, use_tqdm=False)
        assert output.outputs[0].text == outputs[0].outputs[0].text != ""
        assert output.num_cached_tokens == 0 if len(ids) <= 16 else True


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    lengths = [3, 1, 7]
    outputs = llm.generate(
        [PROMPT] * 3,
        [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in lengths],
        use_tqdm=False,
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    with pytest.raises(ValueError, match="2 sampling params for 3 prompts"):
        llm.generate([PROMPT] * 3, [GREEDY] * 2)


def test_a_stream_is_the_whole_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    pieces = list(llm.stream(PROMPT, GREEDY))
    assert len(pieces) > 1 and pieces[-1].finished
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    assert sum((p.outputs[0].token_ids for p in pieces), []) == whole.outputs[0].token_ids


def test_stop_string_cuts_text_and_tokens(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    params = SamplingParams(temperature=0, max_tokens=8, stop=stop)
    (cut,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert len(cut.outputs[0].token_ids) < 8


def test_news_of_what_has_ended_are_no_outputs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they come when the engine has computed a token more than a stop string left."""
    step = llm._core.step
    late = SequenceOutput(request_id="ended", index=0, token_ids=[1])
    monkeypatch.setattr(llm._core, "step", lambda: [*step(), late])
    (whole,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert whole.finished
    assert all(piece.request_id != "ended" for piece in llm.stream(PROMPT, GREEDY))


def test_chat_ends_by_itself_and_takes_many_conversations(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Good morrow, who art thou?"}]
    params = SamplingParams(max_tokens=200, seed=3, temperature=0.8)
    one, two = llm.chat([messages, messages], params, use_tqdm=False)
    assert one.outputs[0].text == two.outputs[0].text
    assert one.outputs[0].finish_reason == "stop"
    assert "<|" not in one.outputs[0].text
    streamed = "".join(piece.outputs[0].text for piece in llm.stream_chat(messages, params))
    assert streamed == one.outputs[0].text


def test_results_come_as_they_finish(llm: LLM) -> None:
    lengths = [30, 2, 10]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    order = [index for index, _ in llm.generate_as_completed([PROMPT] * 3, params)]
    assert order == [1, 2, 0]


def test_bad_requests_leave_a_usable_engine(llm: LLM) -> None:
    for prompt, params, words in [
        ({"prompt_token_ids": []}, SamplingParams(), "empty"),
        ([1, 2, 99999], SamplingParams(), "99999.*0 to 4095"),
        ("x " * 600, SamplingParams(), "maximum context length is 512"),
        (PROMPT, SamplingParams(max_tokens=510), "510 in the output"),
        (PROMPT, SamplingParams(logprobs=21), "maximum, 20"),
        (PROMPT, SamplingParams(logit_bias={4096: 1.0}), "logit_bias .* 4096"),
    ]:
        with pytest.raises(BadRequestError, match=words):
            llm.generate(prompt, params, use_tqdm=False)
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].finished


def test_ctrl_c_leaves_a_usable_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    step, calls = llm._core.step, 0

    def interrupted() -> list[SequenceOutput]:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 5, SamplingParams(max_tokens=100), use_tqdm=False)
    monkeypatch.undo()
    assert llm._core.stats().kv_cache_usage == 0 and llm._core.stats().num_waiting == 0
    (after,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_calls_do_not_mix(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    first = next(stream)
    with pytest.raises(RuntimeError, match="middle of another call"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
    pieces = [first, *stream]
    (whole,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text


def test_an_abandoned_stream_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm._core.has_work
    assert llm._core.stats().kv_cache_usage == 0


def test_nothing_is_compiled_and_nothing_implicit_transferred_after_ready(llm: LLM) -> None:
    """A random load of every kind of request runs on what was compiled ahead."""
    draw = random.Random(0)
    compiled: list[str] = []

    def listen(event: str, duration: float, **details: object) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    kinds = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9, "top_k": 20}, {"logprobs": 3},
        {"prompt_logprobs": 1}, {"presence_penalty": 0.5}, {"logit_bias": {5: 1.0}}, {"n": 3},
        {"bad_words": ["the", "of the king"]}, {"min_tokens": 3}, {"allowed_token_ids": [7, 8, 9]},
    ]  # fmt: skip
    try:
        for _ in range(4):
            asked = [
                ([draw.randrange(6, 4000) for _ in range(draw.randint(1, 150))],
                 SamplingParams(max_tokens=draw.randint(3, 12), **draw.choice(kinds)))
                for _ in range(12)
            ]  # fmt: skip
            with jax.transfer_guard("disallow"):
                llm.generate([p for p, _ in asked], [s for _, s in asked], use_tqdm=False)
    finally:
        monitoring.clear_event_listeners()
    assert llm._core.stats().step_compilations == 0
    assert compiled == []


def test_a_steady_decode_step_needs_nothing_from_the_host(llm: LLM, monkeypatch) -> None:
    """The device counts its input on by itself; only a new page makes the host send one."""
    runner, sizes = llm._core._runner, []
    take_input = runner._take_input
    monkeypatch.setattr(
        runner, "_take_input", lambda words_X: (sizes.append(words_X.size), take_input(words_X))
    )
    page, start = llm.info.page_size, 9
    count = 4 * page
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=count, ignore_eos=True)
    (output,) = llm.generate([list(range(10, 10 + start))], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == count
    # The prompt, the first decode step, and each page that the sequence grows into.
    assert len(sizes) == 2 + (start + count - 1) // page
