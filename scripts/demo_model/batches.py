"""Rows of token ids for training and for measuring the held-out loss."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from demo_model.conversations import Conversations
from demo_model.corpus import Document
from demo_model.tokenizer import Encoder, Segment


@dataclass(frozen=True)
class Rows:
    """N rows of T+1 ids: the first T are read, the last T predicted where `weight_NT` is 1."""

    ids_NT1: np.ndarray
    weight_NT: np.ndarray

    def __len__(self) -> int:
        return len(self.ids_NT1)


class TrainingSet:
    """The text of an epoch: every scene and poem, every speech again in a chat, and questions."""

    def __init__(self, documents: Sequence[Document], encoder: Encoder, num_questions: int) -> None:
        self._documents = documents
        self._conversations = Conversations(documents)
        self._encoder = encoder
        self._num_questions = num_questions
        parts = [part for document in documents for part in document.parts]
        encoder.remember([*(part.text for part in parts), *(part.render() for part in parts)])
        encoder.remember(self._conversations.speeches())

    def epoch(self, seed: int, length: int) -> Rows:
        """One epoch, newly shuffled and newly cut into documents, as rows of `length` + 1 ids."""
        draw = random.Random(seed)
        pieces = [piece for document in self._documents for piece in self._read(document, draw)]
        chats = [
            *self._conversations.from_scenes(draw),
            *self._conversations.from_questions(draw, self._num_questions),
        ]
        pieces += [self._encoder.chat(chat) for chat in chats]
        draw.shuffle(pieces)
        ids, learned = _flat([segment for piece in pieces for segment in piece])
        # Rows begin and end anywhere in a document, so every token is predicted in some epoch.
        N = (len(ids) - 1) // length
        index_NT1 = np.arange(N)[:, None] * length + np.arange(length + 1)
        return Rows(ids[index_NT1], learned[index_NT1[:, 1:]])

    def _read(self, document: Document, draw: random.Random) -> Iterator[list[Segment]]:
        """A document whole, or (half of the scenes) in pieces that begin at any speech, so that
        the model can go on from a prompt without a title; half of these lack the first name."""
        texts, starts = [document.title(), *(part.render() for part in document.parts)], [0]
        cut = document.is_play and draw.random() < 0.5
        if cut:
            texts = texts[1:]
            while (start := starts[-1] + draw.randint(4, 60)) < len(texts):
                starts.append(start)
        for start, stop in zip(starts, [*starts[1:], len(texts)], strict=True):
            piece = texts[start:stop]
            if cut and draw.random() < 0.5:
                piece[0] = document.parts[start].text
            yield self._encoder.document(piece, ends=stop == len(texts))


def held_out_rows(documents: Sequence[Document], encoder: Encoder, length: int) -> Rows:
    """Whole documents, each in rows of `length`; a row after the first sees only itself."""
    return _padded(
        [
            encoder.document([document.title(), *(part.render() for part in document.parts)])
            for document in documents
        ],
        length,
    )


def held_out_chats(documents: Sequence[Document], encoder: Encoder, length: int) -> Rows:
    """Chats of held-out scenes; what the assistant says counts."""
    chats = Conversations(documents).from_scenes(random.Random(0))
    return _padded([encoder.chat(chat) for chat in chats], length)


def _flat(segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and their weights (0 or 1), both [tokens]."""
    ids = np.concatenate([ids for ids, _ in segments])
    learned = np.repeat([learned for _, learned in segments], [len(ids) for ids, _ in segments])
    return ids, learned.astype(np.float32)


def _padded(sequences: Sequence[list[Segment]], length: int) -> Rows:
    rows, weights = [], []
    for segments in sequences:
        ids, learned = _flat(segments)
        for start in range(0, len(ids) - 1, length):
            missing = (0, max(0, start + length + 1 - len(ids)))
            rows.append(np.pad(ids[start : start + length + 1], missing))
            weights.append(np.pad(learned[start : start + length + 1], missing)[1:])
    return Rows(np.stack(rows), np.stack(weights))
