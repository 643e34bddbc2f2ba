from __future__ import annotations

import functools
import random

import pytest

from jaxpaged.engine.detokenizer import LONGEST_WINDOW, Detokenizer, TokenText
from jaxpaged.engine.tokenizer import Tokenizer

PIECES = [
    *(
        "hello",
        " world",
        "  ",
        "\n",
        "ď",
        "žluťoučký kůň",
        "😀",
        "👨‍👩‍👧",
        "日本語",
        "a",
        " b",
        "…",
    ),
    *("<|end|>", "<|user|>"),
]


def texts(count: int) -> list[str]:
    draw = random.Random(1)
    return ["".join(draw.choices(PIECES, k=draw.randint(1, 30))) for _ in range(count)]


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """What is shown after each token, up to a stop string."""
    shown = []
    for token_id in token_ids:
        stopped = detokenizer.add(token_id)
        shown.append(detokenizer.take())
        if stopped:
            break
    return [*shown, detokenizer.take(final=True)]


@pytest.fixture(params=["tokenizer", "byte_fallback"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("skip_special", [True, False])
def test_pieces_are_whole_characters_and_join_to_the_text(
    any_tokenizer: Tokenizer, skip_special: bool
):
    decode = functools.partial(any_tokenizer.decode, skip_special_tokens=skip_special)
    for text in texts(150):
        token_ids = any_tokenizer.encode(text, add_special_tokens=False)
        shown = pieces(Detokenizer(decode), token_ids)
        assert not any("\ufffd" in piece for piece in shown)
        assert "".join(shown) == decode(token_ids)


def test_a_space_after_the_prompt_is_kept(any_tokenizer: Tokenizer):
    decode = any_tokenizer.decode
    for prompt_len in range(1, 12):
        token_ids = any_tokenizer.encode("hello world 😀 hello world", add_special_tokens=False)
        prompt, rest = token_ids[:prompt_len], token_ids[prompt_len:]
        if decode(prompt).endswith("\ufffd"):
            continue
        shown = "".join(pieces(Detokenizer(decode, prompt), rest))
        assert decode(prompt) + shown == decode(token_ids)


def test_a_character_that_the_prompt_began_is_shown(tokenizer: Tokenizer):
    token_ids = tokenizer.encode("😀!", add_special_tokens=False)
    assert "".join(pieces(Detokenizer(tokenizer.decode, token_ids[:2]), token_ids[2:])) == "😀!"


def test_an_unfinished_character_is_dropped(tokenizer: Tokenizer):
    token_ids = tokenizer.encode("ok 😀", add_special_tokens=False)
    assert "".join(pieces(Detokenizer(tokenizer.decode), token_ids[:-1])) == "ok "


def test_bytes_that_are_no_character_do_not_hold_up_the_rest(any_tokenizer: Tokenizer):
    emoji = any_tokenizer.encode("😀", add_special_tokens=False)[-4:]
    hello = any_tokenizer.encode("hello", add_special_tokens=False)
    shown = pieces(Detokenizer(any_tokenizer.decode), [*emoji, *[emoji[1]] * 9, *hello])
    assert shown[3] == "😀"
    assert any(shown[4:10]), "they are shown before a character comes"
    assert "".join(shown).replace(" ", "") == "😀" + "\ufffd" * 9 + "hello"


def test_the_window_stays_short(any_tokenizer: Tokenizer):
    text = TokenText(any_tokenizer.decode)
    longest = 0
    for token_id in any_tokenizer.encode("😀hello日" * 100, add_special_tokens=False):
        text.add(token_id)
        longest = max(longest, len(text._window))
    assert longest <= LONGEST_WINDOW + 10


def test_a_stop_string_over_tokens_is_never_shown(tokenizer: Tokenizer):
    token_ids = tokenizer.encode("Alpha Beta Gamma Delta", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer.decode, stop=["eta Gam"])
    shown = pieces(detokenizer, token_ids)
    assert "".join(shown) == "Alpha B"
    assert detokenizer.stop_string == "eta Gam"
    used = detokenizer.num_tokens
    assert "eta Gam" in tokenizer.decode(token_ids[:used])
    assert "eta Gam" not in tokenizer.decode(token_ids[: used - 1])


def test_a_false_start_of_a_stop_string_is_shown_late(tokenizer: Tokenizer):
    token_ids = tokenizer.encode("Alpha Beta Gamma", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer.decode, stop=["Alpha Z"])
    shown = pieces(detokenizer, token_ids)
    assert "".join(shown) == "Alpha Beta Gamma"
    assert detokenizer.stop_string is None


def test_text_that_ends_in_half_a_stop_string_is_shown_at_the_end(tokenizer: Tokenizer):
    token_ids = tokenizer.encode("Alpha Be", add_special_tokens=False)
    shown = pieces(Detokenizer(tokenizer.decode, stop=["Beta"]), token_ids)
    assert shown[-1] == "Be"


def test_no_prefix_of_the_stop_string_leaks(tokenizer: Tokenizer):
    draw = random.Random(2)
    text = "abab" * 10 + "abac" + "tail"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for _ in range(100):
        start = draw.randrange(len(text) - 2)
        stop = [text[start : start + draw.randint(1, 8)], "never"]
        shown = ""
        for piece in pieces(Detokenizer(tokenizer.decode, stop=stop), token_ids):
            shown += piece
        assert shown == text[: text.index(stop[0])]


def test_the_stop_string_can_be_included(tokenizer: Tokenizer):
    token_ids = tokenizer.encode("Alpha Beta Gamma", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer.decode, stop=["Bet"], include_stop=True)
    assert "".join(pieces(detokenizer, token_ids)) == "Alpha Bet"


def test_the_first_stop_string_to_be_complete_wins(tokenizer: Tokenizer):
    token_ids = tokenizer.encode("hello world", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer.decode, stop=["hello world", "llo", "ello"])
    assert "".join(pieces(detokenizer, token_ids)) == "h"
    assert detokenizer.stop_string == "ello"


def test_no_stop_string_counts_before_min_tokens(tokenizer: Tokenizer):
    token_ids = tokenizer.encode("ababab", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer.decode, stop=["ab"], min_tokens=len(token_ids) - 2)
    assert "".join(pieces(detokenizer, token_ids)) == "abab"
