"""From the engine's token ids to the outputs that users see."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from jaxpaged.engine.detokenizer import Detokenizer
from jaxpaged.engine.errors import RequestFailedError
from jaxpaged.engine.messages import AddRequest, FinishSequence, SequenceOutput
from jaxpaged.engine.messages import TokenLogprobs as RawLogprobs
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs


@dataclass
class _Choice:
    output: CompletionOutput  # all of it, unless only deltas are wanted
    detokenizer: Detokenizer | None
    logprob: float = 0.0  # of all tokens so far


@dataclass
class _Request:
    request: AddRequest
    prompt: str | None
    delta: bool
    choices: list[_Choice]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    scheduled_time: float | None = None
    unfinished: set[int] = field(default_factory=set)


class OutputProcessor:
    """Keeps the text of every request in flight.

    Args:
        tokenizer: None leaves every text empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}

    @property
    def num_requests(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    def add(self, request: AddRequest, prompt: str | None, *, delta: bool) -> None:
        """Expect outputs of a request.

        Args:
            prompt: its text, if known.
            delta: outputs hold what is new; otherwise everything so far.
        """
        choices = [
            _Choice(CompletionOutput(index), self._detokenizer(request))
            for index in range(request.params.n)
        ]
        self._requests[request.request_id] = _Request(
            request, prompt, delta, choices, unfinished=set(range(request.params.n))
        )

    def abort(self, request_id: str) -> None:
        """Forget a request; later news of it is ignored."""
        self._requests.pop(request_id, None)

    def process(self, news: SequenceOutput) -> tuple[RequestOutput | None, FinishSequence | None]:
        """Take news of a choice.

        Returns:
            The output to show, None if the request or choice had ended; and what to tell the
            engine when a stop string ended the choice before the engine did.

        Raises:
            RequestFailedError: the engine refused or lost the request.
        """
        state = self._requests.get(news.request_id)
        if state is None:
            return None, None
        if news.finish_reason == "error":
            del self._requests[news.request_id]
            raise RequestFailedError(news.error or "the request failed", news.error_code)
        if news.index not in state.unfinished:
            return None, None
        self._take_request_news(state, news)
        fresh, tell = self._take_choice_news(state, news)
        if fresh.finish_reason is not None:
            state.unfinished.discard(news.index)
        finished = not state.unfinished
        if finished:
            del self._requests[news.request_id]
        output = RequestOutput(
            request_id=news.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.request.prompt_token_ids,
            outputs=[fresh] if state.delta else [choice.output for choice in state.choices],
            finished=finished,
            prompt_logprobs=state.prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens,
            scheduled_time=state.scheduled_time,
            embedding=news.embedding,
        )
        return output, tell

    def _detokenizer(self, request: AddRequest) -> Detokenizer | None:
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            functools.partial(
                self._tokenizer.decode,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
            request.prompt_token_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _take_request_news(self, state: _Request, news: SequenceOutput) -> None:
        state.num_cached_tokens = news.num_cached_tokens or state.num_cached_tokens
        state.scheduled_time = news.scheduled_time or state.scheduled_time
        if news.prompt_logprobs is not None:
            state.prompt_logprobs = [
                None if entry is None else self._logprobs(entry) for entry in news.prompt_logprobs
            ]

    def _take_choice_news(
        self, state: _Request, news: SequenceOutput
    ) -> tuple[CompletionOutput, FinishSequence | None]:
        """What is new of the choice, up to a stop string."""
        choice = state.choices[news.index]
        fresh = CompletionOutput(
            index=news.index,
            token_ids=news.token_ids,
            finish_reason=news.finish_reason,
            stop_reason=news.stop_reason,
        )
        tell = None
        if choice.detokenizer is not None:
            # The token that ended it (EOS or a stop token) is no part of the text.
            ends_unseen = (
                news.finish_reason == "stop" and not state.request.params.include_stop_str_in_output
            )
            tell = self._read(choice.detokenizer, fresh, news, ends_unseen)
        if state.request.params.logprobs is not None:
            raw = (news.logprobs or [])[: len(fresh.token_ids)]
            fresh.logprobs = [self._logprobs(entry) for entry in raw]
            choice.logprob += sum(entry.logprob for entry in raw)
            fresh.cumulative_logprob = choice.logprob
        if not state.delta:
            _extend(choice.output, fresh)
        return fresh, tell

    @staticmethod
    def _read(
        detokenizer: Detokenizer, fresh: CompletionOutput, news: SequenceOutput, ends_unseen: bool
    ) -> FinishSequence | None:
        """Set the text; a stop string cuts the tokens behind it."""
        tell = None
        shown = news.token_ids[:-1] if ends_unseen else news.token_ids
        for count, token_id in enumerate(shown, 1):
            if detokenizer.add(token_id):
                fresh.token_ids = news.token_ids[:count]
                if news.finish_reason is None or count < len(news.token_ids):
                    tell = FinishSequence(news.request_id, news.index, detokenizer.num_tokens)
                fresh.finish_reason, fresh.stop_reason = "stop", detokenizer.stop_string
                break
        fresh.text = detokenizer.take(final=fresh.finished)
        return tell

    def _logprobs(self, raw: RawLogprobs) -> TokenLogprobs:
        def text(token_id: int) -> str | None:
            return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

        found = {raw.token_id: Logprob(raw.logprob, raw.rank, text(raw.token_id))}
        for rank, (token_id, logprob) in enumerate(
            zip(raw.top_ids, raw.top_logprobs, strict=True), 1
        ):
            found.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
        return found


def _extend(whole: CompletionOutput, fresh: CompletionOutput) -> None:
    whole.text += fresh.text
    whole.token_ids += fresh.token_ids
    whole.cumulative_logprob = fresh.cumulative_logprob
    if whole.logprobs is None:
        whole.logprobs = fresh.logprobs
    else:
        whole.logprobs += fresh.logprobs or []
    whole.finish_reason, whole.stop_reason = fresh.finish_reason, fresh.stop_reason
