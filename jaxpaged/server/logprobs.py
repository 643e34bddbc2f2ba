"""Log-probabilities in the three forms that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.outputs import Logprob, TokenLogprobs
from jaxpaged.server.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
    finite,
)


@dataclass(frozen=True)
class LogprobWriter:
    """Writes log-probabilities for one request.

    Args:
        count: how many of the most likely tokens are shown beside each token.
        tokenizer: for the bytes of tokens.
        as_ids: spell tokens as "token_id:N".
    """

    count: int
    tokenizer: Tokenizer | None
    as_ids: bool

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        first_offset: int,
    ) -> tuple[CompletionLogprobs, int]:
        """OpenAI's older form, and the offset in the text where the next token begins.

        Args:
            logprobs: one a token; None for the first token of a prompt.
            first_offset: characters of text before the first token.
        """
        written = CompletionLogprobs()
        offset = first_offset
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            written.text_offset.append(offset)
            chosen = None if entry is None else entry[token_id]
            text = self._plain_text(token_id, chosen)
            offset += len(text)
            written.tokens.append(self._spell(token_id, text))
            written.token_logprobs.append(None if chosen is None else finite(chosen.logprob))
            written.top_logprobs.append(None if entry is None else self._tops(token_id, entry))
        return written, offset

    def chat(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> ChatLogprobs:
        """OpenAI's newer form."""
        content = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            if entry is None:
                continue
            tops = self._most_likely(entry)
            content.append(
                TokenLogprob(
                    **self._top(token_id, entry[token_id]).model_dump(),
                    top_logprobs=[self._top(*top) for top in tops],
                )
            )
        return ChatLogprobs(content=content)

    def _top(self, token_id: int, logprob: Logprob) -> TopLogprob:
        raw = None if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        return TopLogprob(
            token=self._spell(token_id, logprob.decoded_token),
            logprob=finite(logprob.logprob),
            bytes=raw,
        )

    def _most_likely(self, entry: TokenLogprobs) -> list[tuple[int, Logprob]]:
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)
        return [item for item in ranked if item[1].rank <= self.count][: self.count]

    def _tops(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, and the chosen one even if it is none of them."""
        tops: dict[str, float] = {}
        for top, logprob in [*self._most_likely(entry), (token_id, entry[token_id])]:
            # Of tokens that read the same, such as parts of characters, the likeliest is shown.
            tops.setdefault(self._spell(top, logprob.decoded_token), finite(logprob.logprob))
        return tops

    def _plain_text(self, token_id: int, logprob: Logprob | None) -> str:
        if logprob is not None:
            return logprob.decoded_token or ""
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def _spell(self, token_id: int, text: str | None) -> str:
        return f"token_id:{token_id}" if self.as_ids or text is None else text


def write_prompt_logprobs(logprobs: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """vLLM's form of a prompt's log-probabilities."""
    return [
        None
        if entry is None
        else {token_id: PromptLogprob.of(logprob) for token_id, logprob in entry.items()}
        for entry in logprobs
    ]
