"""From the engine's token ids to the outputs that users see."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from jaxpaged.engine.detokenizer import Detokenizer
from jaxpaged.engine.errors import BadRequestError, RequestFailedError
from jaxpaged.engine.messages import AddRequest, FinishSequence, SequenceOutput
from jaxpaged.engine.messages import TokenLogprobs as RawLogprobs
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs


@dataclass(slots=True)
class _Choice:
    output: CompletionOutput  # all of it, unless only deltas are wanted
    detokenizer: Detokenizer | None
    logprob: float = 0.0  # of all tokens so far


@dataclass(slots=True)
class _Request:
    request: AddRequest
    whole: RequestOutput  # unless only deltas are wanted; what is said once a request, in any case
    delta: bool
    choices: list[_Choice]
    unfinished: set[int]


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
            delta: outputs hold what is new; otherwise everything so far, the same object each time.
        """
        choices = [
            _Choice(CompletionOutput(index), self._detokenizer(request))
            for index in range(request.params.n)
        ]
        whole = RequestOutput(
            request.request_id, prompt, request.prompt_token_ids, [c.output for c in choices]
        )
        self._requests[request.request_id] = _Request(
            request, whole, delta, choices, unfinished=set(range(request.params.n))
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
            BadRequestError: it cannot be fulfilled, as showed only now.
        """
        state = self._requests.get(news.request_id)
        if state is None:
            return None, None
        if news.finish_reason == "error":
            del self._requests[news.request_id]
            reason = news.error or "the request failed"
            if news.error_code == 400:
                raise BadRequestError(reason, news.error_param)
            raise RequestFailedError(reason, news.error_code)
        if news.index not in state.unfinished:
            return None, None
        whole = state.whole
        if news.scheduled_time is not None:
            self._take_first_news(whole, news)
        choice, tell = self._take_choice_news(state, news)
        if choice.finish_reason is not None:
            state.unfinished.discard(news.index)
            if not state.unfinished:
                whole.finished = True
                del self._requests[news.request_id]
        if not state.delta:
            whole.embedding = news.embedding
            return whole, tell
        output = RequestOutput(
            request_id=news.request_id,
            prompt=whole.prompt,
            prompt_token_ids=whole.prompt_token_ids,
            outputs=[choice],
            finished=whole.finished,
            prompt_logprobs=whole.prompt_logprobs,
            num_cached_tokens=whole.num_cached_tokens,
            scheduled_time=whole.scheduled_time,
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

    def _take_first_news(self, whole: RequestOutput, news: SequenceOutput) -> None:
        """Take what is said once a request."""
        whole.num_cached_tokens, whole.scheduled_time = news.num_cached_tokens, news.scheduled_time
        if news.prompt_logprobs is not None:
            whole.prompt_logprobs = [
                None if entry is None else self._logprobs(entry) for entry in news.prompt_logprobs
            ]

    def _take_choice_news(
        self, state: _Request, news: SequenceOutput
    ) -> tuple[CompletionOutput, FinishSequence | None]:
        """The choice with what is new of it, up to a stop string; or that alone."""
        choice = state.choices[news.index]
        output = CompletionOutput(news.index) if state.delta else choice.output
        output.finish_reason, output.stop_reason = news.finish_reason, news.stop_reason
        token_ids, tell = news.token_ids, None
        if choice.detokenizer is not None:
            # The token that ended it (EOS or a stop token) is no part of the text.
            ends_unseen = (
                news.finish_reason == "stop" and not state.request.params.include_stop_str_in_output
            )
            token_ids, tell = self._read(choice.detokenizer, output, news, ends_unseen)
        output.token_ids += token_ids
        if state.request.params.logprobs is not None:
            raw = (news.logprobs or [])[: len(token_ids)]
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs += [self._logprobs(entry) for entry in raw]
            choice.logprob += sum(entry.logprob for entry in raw)
            output.cumulative_logprob = choice.logprob
        return output, tell

    @staticmethod
    def _read(
        detokenizer: Detokenizer, output: CompletionOutput, news: SequenceOutput, ends_unseen: bool
    ) -> tuple[list[int], FinishSequence | None]:
        """Add to the text; returns the new tokens, less those that a stop string cuts."""
        token_ids, tell = news.token_ids, None
        shown = token_ids[:-1] if ends_unseen else token_ids
        for count, token_id in enumerate(shown, 1):
            if detokenizer.add(token_id):
                if news.finish_reason is None or count < len(token_ids):
                    tell = FinishSequence(news.request_id, news.index, detokenizer.num_tokens)
                token_ids = token_ids[:count]
                output.finish_reason, output.stop_reason = "stop", detokenizer.stop_string
                break
        output.text += detokenizer.take(final=output.finished)
        return token_ids, tell

    def _logprobs(self, raw: RawLogprobs) -> TokenLogprobs:
        def text(token_id: int) -> str | None:
            return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

        found = {raw.token_id: Logprob(raw.logprob, raw.rank, text(raw.token_id))}
        for rank, (token_id, logprob) in enumerate(
            zip(raw.top_ids, raw.top_logprobs, strict=True), 1
        ):
            found.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
        return found
