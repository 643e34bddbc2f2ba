"""Chats made of the plays: one speech is the user's turn, the reply to it the assistant's.

A few more answer what people ask a chat model (questions.toml) with lines of the plays, so that
a greeting gets a greeting and a question about love gets a speech about love.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from demo_model.corpus import Document

Chat = list[tuple[str, str]]  # (role, content)

MAX_TURN = 700  # characters: an answer should end while somebody still reads
_SENTENCE_END = re.compile(r"[.!?]['\"]?(?=\s)")


def dialogue(document: Document) -> list[tuple[str, str]]:
    """(speaker, speech) pairs of a scene, without its stage directions; nobody twice in a row."""
    speeches: list[tuple[str, str]] = []
    for part in document.parts:
        text = re.sub(r" *[\[(](?:Aside|[A-Z])[^\])]*[\])]", "", part.text).strip()
        if part.is_direction or not text:
            continue
        if speeches and part.speaker in ("", speeches[-1][0]):
            speeches[-1] = (speeches[-1][0], f"{speeches[-1][1]}\n{text}")
        elif part.speaker:
            speeches.append((part.speaker, text))
    return speeches


def shorten(speech: str, limit: int = MAX_TURN) -> str:
    """The sentences of a speech that fit in `limit` characters; at least the first."""
    if len(speech) <= limit:
        return speech
    ends = [match.end() for match in _SENTENCE_END.finditer(speech)]
    return speech[: max([end for end in ends if end <= limit], default=(ends or [limit])[0])]


class Conversations:
    """Draws chats from the scenes of plays and from poems."""

    def __init__(self, documents: Sequence[Document]) -> None:
        scenes = [dialogue(document) for document in documents if document.is_play]
        self._speeches = [s for scene in scenes for _, s in scene if 20 <= len(s) <= MAX_TURN]
        self._scenes = [[(speaker, shorten(speech)) for speaker, speech in s] for s in scenes]
        self._poems = [
            document.parts[0].text for document in documents if document.work == "THE SONNETS"
        ]
        questions: dict[str, Any] = tomllib.loads(
            Path(__file__).with_name("questions.toml").read_text("utf-8")
        )
        self._topics, self._other_topics = questions["topics"], questions["other_topics"]
        self._by_topic = self._index_topics()
        self._about, self._poem = questions["about"], questions["poem"]
        self._small_talk = [
            (kind["say"], [s for s in self._speeches if _answers(kind, s)])
            for kind in questions["small_talk"]
        ]
        self._systems = questions["system"]

    def speeches(self) -> list[str]:
        """Every turn that `from_scenes` can draw."""
        return [speech for scene in self._scenes for _, speech in scene]

    def _index_topics(self) -> dict[str, list[str]]:
        topics = {topic: set(words.split()) for topic, words in self._topics.items()}
        found = defaultdict(list)
        for speech in (speech for speech in self._speeches if len(speech) >= 60):
            start = set(re.findall(r"[a-z]+", speech[:160].lower()))
            for topic, words in topics.items():
                if words & start:
                    found[topic].append(speech)
        return dict(found)

    def from_scenes(self, draw: random.Random) -> Iterator[Chat]:
        """Every speech of every scene once, two to eight to a chat."""
        for scene in self._scenes:
            start = draw.randint(0, 1)
            while len(scene) - start >= 2:
                turns = scene[start : start + draw.choice((2, 2, 4, 4, 6, 8))]
                turns = turns[: len(turns) // 2 * 2]
                start += len(turns)
                chat = [
                    ("assistant" if i % 2 else "user", speech)
                    for i, (_, speech) in enumerate(turns)
                ]
                speakers = {speaker for speaker, _ in turns[1::2]}
                if draw.random() < 0.4:
                    chat.insert(0, ("system", self._system(draw, speakers)))
                yield chat

    def from_questions(self, draw: random.Random, count: int) -> Iterator[Chat]:
        """`count` chats that begin with a question or small talk of questions.toml."""
        for _ in range(count):
            kind = draw.random()
            if kind < 0.3:
                say, answers = draw.choice(self._small_talk)
                chat = [("user", draw.choice(say)), ("assistant", draw.choice(answers))]
                if draw.random() < 0.3:
                    chat += self._on_a_topic(draw)
            elif kind < 0.4:
                poem = draw.choice(self._poems)
                chat = [("user", draw.choice(self._poem)), ("assistant", poem)]
            else:
                chat = self._on_a_topic(draw)
            if draw.random() < 0.2:
                chat.insert(0, ("system", self._system(draw, set())))
            yield chat

    def _on_a_topic(self, draw: random.Random) -> Chat:
        if draw.random() < 0.15:  # nothing of the time: any speech
            topic, answer = draw.choice(self._other_topics), draw.choice(self._speeches)
        else:
            topic = draw.choice(list(self._by_topic))
            answer = draw.choice(self._by_topic[topic])
        return [("user", draw.choice(self._about).replace("{}", topic)), ("assistant", answer)]

    def _system(self, draw: random.Random, speakers: set[str]) -> str:
        if len(speakers) == 1 and draw.random() < 0.7:
            name = speakers.pop().title().replace(" Of ", " of ").replace("'S", "'s")
            return draw.choice(self._systems["character"]).replace("{}", name)
        return str(draw.choice(self._systems["plain"]))


def _answers(kind: dict[str, Any], speech: str) -> bool:
    return len(speech) <= kind["longest"] and re.match(kind["answer"], speech) is not None
