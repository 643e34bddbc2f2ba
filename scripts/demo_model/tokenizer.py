"""The demo model's tokenizer: byte-level BPE, so that any UTF-8 text is encodable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

BOS, EOS = "<|bos|>", "<|eos|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
END = "<|end|>"  # ends a message
SPECIAL_TOKENS = (BOS, EOS, *ROLES.values(), END)  # ids 0, 1, ...

# Runs of newlines stay whole ("\n\n" parts speeches), and so do the period's contractions
# ("'tis", "o'er", "lov'd").
_PIECE = Regex(
    r"\n+| ?'?\p{L}+(?:'\p{L}+)*| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?=\s|$)|[^\S\n]+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on `texts`. `vocab_size` counts the special tokens and the 256 bytes.

    Text encoded with special tokens gets BOS in front; a chat template writes its own.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECE, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


Segment = tuple[np.ndarray, bool]  # token ids, and whether the model learns to write them


class Encoder:
    """Token ids of texts and chats, as the model is trained on them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos, self.eos, self._end = (self._special(token) for token in (BOS, EOS, END))
        self.bos_id = int(self.bos[0])
        self._roles = {role: self._special(token) for role, token in ROLES.items()}
        self._cache: dict[str, np.ndarray] = {}

    def _special(self, token: str) -> np.ndarray:
        return np.array([self._tokenizer.token_to_id(token)], np.int32)

    def remember(self, texts: Sequence[str]) -> None:
        """Encode many texts at once, for `text` to find: every epoch meets the same speeches."""
        for text, encoding in zip(
            texts, self._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            self._cache[text] = np.array(encoding.ids, np.int32)

    def text(self, text: str) -> np.ndarray:
        """Ids without BOS."""
        if text not in self._cache:
            self.remember([text])
        return self._cache[text]

    def document(self, texts: Sequence[str], *, ends: bool = True) -> list[Segment]:
        """BOS, the texts parted by empty lines, and EOS if the document ends there: what encoding
        the joined text gives, since a run of newlines is a piece of its own."""
        gap = self.text("\n\n")
        body = [part for text in texts for part in (gap, self.text(text))][1:]
        return [(self.bos, False), *((ids, True) for ids in body), *([(self.eos, True)] * ends)]

    def chat(self, messages: Iterable[tuple[str, str]]) -> list[Segment]:
        """(role, content) pairs as the chat template renders them; the assistant's are learned."""
        segments = [(self.bos, False)]
        for role, content in messages:
            said = role == "assistant"
            segments += [(self._roles[role], False), (self.text(content), said), (self._end, said)]
        return segments
