"""Makes tokenizer.json of the vocabulary in a GGUF file.

transformers reads such files, too, but only where PyTorch is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jaxpaged.gguf.config import architecture
from jaxpaged.gguf.header import Gguf
from jaxpaged.model_errors import ModelFilesError

# Kinds of tokens that are matched whole; the last are text like any other.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
LONGEST = 4096  # characters of a token: far above what any vocabulary has
SPACE = "\u2581"  # what SentencePiece writes for a space

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a byte-level vocabulary splits a text before it merges, by tokenizer.ggml.pre; None: as GPT-2
# does. Source: llama.cpp's llama-vocab.cpp and the models' own tokenizer.json.
SPLITS: Mapping[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# A word of the vocabulary is a token, whatever merges make of it; and unless the file says
# otherwise, a text begins with BOS.
WHOLE_WORDS = (_LLAMA3, _TEKKEN)


def make_tokenizer(gguf: Gguf) -> tuple[Tokenizer, dict[str, Any]] | None:
    """What tokenizer.json and tokenizer_config.json hold; None: the file has no vocabulary.

    Raises:
        ModelFilesError: a kind of tokenizer that is not supported, or one that contradicts itself.
    """
    if "tokenizer.ggml.model" not in gguf.metadata:
        return None
    try:
        return _make(gguf)
    except ModelFilesError:
        raise
    except Exception as error:  # tokenizers raises nothing more special
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelFilesError(f"{gguf.path}: its tokenizer is not sound: {reason}") from error


def _make(gguf: Gguf) -> tuple[Tokenizer, dict[str, Any]]:
    kind = gguf.text("tokenizer.ggml.model")
    tokens = gguf.items("tokenizer.ggml.tokens", str)
    if any(len(token) > LONGEST for token in tokens):
        raise ModelFilesError(f"{gguf.path}: its vocabulary has a token above {LONGEST} characters")
    if kind == "llama":
        tokenizer, begins = _sentence_piece(gguf, tokens), True
    elif kind == "gpt2":
        tokenizer, begins = _byte_level(gguf, tokens)
    else:
        raise ModelFilesError(
            f"{gguf.path}: tokenizer {kind!r} is not supported (supported: llama, gpt2): put the "
            f"model's tokenizer.json beside the file"
        )
    special = {name: _token(gguf, tokens, key) for name, key in SPECIAL.items()}
    kinds = gguf.items("tokenizer.ggml.token_type", int)
    whole = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and tokenizer.token_to_id(token) is not None
    ]
    tokenizer.add_tokens(whole)
    _add_ends(
        tokenizer,
        special["bos_token"] if gguf.metadata.get("tokenizer.ggml.add_bos_token", begins) else None,
        special["eos_token"] if gguf.metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in special.items() if token is not None},
    }
    if "tokenizer.chat_template" in gguf.metadata:
        settings["chat_template"] = gguf.text("tokenizer.chat_template")
    return tokenizer, settings


def _token(gguf: Gguf, tokens: Sequence[str], key: str) -> str | None:
    if key not in gguf.metadata:
        return None
    token_id = gguf.integer(key)
    if token_id >= len(tokens):
        raise ModelFilesError(f"{gguf.path}: {key} is {token_id}, of {len(tokens)} tokens")
    return tokens[token_id]


def _sentence_piece(gguf: Gguf, tokens: Sequence[str]) -> Tokenizer:
    """Characters merged into pieces, the best-scored first; bytes for what has no piece."""
    gemma = architecture(gguf) == "gemma3"
    if gemma:  # the converter writes tokens of several spaces as such
        tokens = [
            SPACE * len(token) if token.isspace() and " " in token else token for token in tokens
        ]
    scores = gguf.items("tokenizer.ggml.scores", float)
    if gemma:  # its scores do not follow its merges; the order of its tokens does
        scores = [-float(place) for place in range(len(tokens))]
    if len(scores) != len(tokens):
        raise ModelFilesError(f"{gguf.path}: {len(scores)} scores of {len(tokens)} tokens")
    vocab = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges(vocab, scores),
            unk_token=_token(gguf, tokens, SPECIAL["unk_token"]),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = gguf.metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])]
    )
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, in the order in which SentencePiece tries them."""
    found = []
    for token, place in vocab.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in vocab and right in vocab:
                found.append((-scores[place], vocab[left], vocab[right], left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _byte_level(gguf: Gguf, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """GPT-2's kind, and whether a text begins with BOS unless the file says otherwise."""
    name = gguf.text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ModelFilesError(
            f"{gguf.path}: tokenizer.ggml.pre {name!r} is not supported (supported: "
            f"{', '.join(SPLITS)}): put the model's tokenizer.json beside the file"
        )
    split = SPLITS[name]
    vocab = {token: place for place, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.items("tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=split in WHOLE_WORDS))
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split in WHOLE_WORDS


def _add_ends(tokenizer: Tokenizer, first: str | None, last: str | None) -> None:
    around = [token for token in (first, last) if token is not None]
    if around:
        template = [*([first] if first else []), "$A", *([last] if last else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template,
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in around],
        )
