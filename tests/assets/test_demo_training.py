"""What the demo model is trained on, and that its export is the network that was trained."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from paged_runner import PagedRunner
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from jaxpaged.model_files import DEMO_MODEL

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from demo_model import batches, conversations, corpus, export, network
from demo_model.tokenizer import Encoder

PLAY = """THE TRAGEDY OF NOBODY

by William Shakespeare


PERSONS REPRESENTED.

Hamlet, a Prince.
Horatio, his friend.

SCENE: Elsinore.

ACT I.

Scene I. A platform.

[Enter Hamlet and
Horatio.]

Ham.
Who's there?

Hor.
A friend, my lord; one that hath walked far
to see you.

[Exit Hamlet.]

He is gone.

Ham.
Stay, stay!
I come again.

Hor.
My lord!

Ham.
Farewell.

Hor.
Adieu.

Scene II. The same.

Ham.
  Alone at last,
And yet not so.

THE END
"""
POEMS = """THE SONNETS

by William Shakespeare

I

From fairest creatures we desire increase,
That thereby beauty's rose might never die.

II

When forty winters shall besiege thy brow,
  And dig deep trenches.
"""


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))


def test_a_play_becomes_scenes():
    first, second = corpus.parse_work(PLAY)
    assert first.title() == "THE TRAGEDY OF NOBODY\nACT I. SCENE I. A platform."
    assert [(part.speaker, part.text) for part in first.parts[:5]] == [
        ("", "[Enter Hamlet and Horatio.]"),
        ("HAMLET", "Who's there?"),
        ("HORATIO", "A friend, my lord; one that hath walked far to see you."),
        ("", "[Exit Hamlet.]"),
        ("", "He is gone."),
    ]
    assert second.render() == (
        "THE TRAGEDY OF NOBODY\nACT I. SCENE II. The same.\n\n"
        "HAMLET.\nAlone at last,\nAnd yet not so."
    )


def test_numbered_poems_are_documents():
    assert [poem.title() for poem in corpus.parse_work(POEMS)] == [
        "THE SONNETS\nI",
        "THE SONNETS\nII",
    ]


def test_a_text_without_plays_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="_gut.txt"):
        corpus.read_documents(tmp_path)


def test_speeches_alternate_in_a_dialogue():
    speeches = conversations.dialogue(corpus.parse_work(PLAY)[0])
    assert speeches[:3] == [
        ("HAMLET", "Who's there?"),
        ("HORATIO", "A friend, my lord; one that hath walked far to see you.\nHe is gone."),
        ("HAMLET", "Stay, stay!\nI come again."),
    ]


def test_a_long_speech_ends_with_a_sentence():
    assert conversations.shorten("One. Two! Three four five.", 12) == "One. Two!"
    assert conversations.shorten("A sentence far too long. End.", 5) == "A sentence far too long."


def test_every_speech_of_a_scene_is_in_one_chat():
    chats = conversations.Conversations(corpus.parse_work(PLAY))
    turns = [turn for chat in chats.from_scenes(random.Random(1)) for turn in chat]
    said = [content for role, content in turns if role != "system"]
    assert said == chats.speeches()[-len(said) :] or said == chats.speeches()[: len(said)]
    assert len(said) >= 4


def test_a_document_is_encoded_as_its_text(encoder: Encoder):
    document = corpus.parse_work(PLAY)[0]
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = [document.title(), *(part.render() for part in document.parts)]
    ids = np.concatenate([ids for ids, _ in encoder.document(texts)])
    assert ids.tolist() == [*tokenizer.encode(document.render()).ids, *encoder.eos]


def test_a_chat_is_encoded_as_the_template_renders_it(encoder: Encoder):
    chat = [("system", "Be brief."), ("user", "Who's there?"), ("assistant", "A friend,\nmy lord.")]
    segments = encoder.chat(chat)
    messages = [{"role": role, "content": content} for role, content in chat]
    rendered = AutoTokenizer.from_pretrained(DEMO_MODEL).apply_chat_template(messages)
    assert np.concatenate([ids for ids, _ in segments]).tolist() == rendered["input_ids"]
    learned = np.concatenate([ids for ids, learned in segments if learned])
    assert learned.tolist() == [*encoder.text("A friend,\nmy lord."), rendered["input_ids"][-1]]


def test_held_out_rows_predict_every_token_once(encoder: Encoder):
    documents = corpus.parse_work(PLAY)
    rows = batches.held_out_rows(documents, encoder, 16)
    total = sum(len(encoder.text(document.render())) + 1 for document in documents)  # and EOS
    assert rows.weight_NT.sum() == total
    assert rows.ids_NT1.shape == (len(rows), 17)


def test_the_export_is_the_network_that_was_trained(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    config = network.NetworkConfig(
        tokenizer.get_vocab_size(), 64, 96, 2, dtype="float32", max_position_embeddings=64
    )
    model = network.Llama(config, bos_token_id=0)
    ids = np.random.default_rng(0).integers(6, config.vocab_size, (1, 24))
    ids[0, 0] = ids[0, 10] = 0  # two documents: the second sees nothing of the first
    params = model.init(jax.random.key(0), ids)["params"]
    keys = iter(jax.random.split(jax.random.key(1), 100))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)
    params = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)
    export.export(tmp_path, params, config, tokenizer)
    expected = np.asarray(model.apply({"params": params}, ids))[0, -1]
    _, (logits,) = PagedRunner.load(tmp_path).generate([ids[0, 10:].tolist()], 1)
    np.testing.assert_allclose(logits[0], expected, atol=1e-3 * abs(expected).max())
