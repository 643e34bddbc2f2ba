"""A byte-level BPE tokenizer of any vocabulary size, made in seconds without training.

    python -m benchmarks.make_tokenizer CONFIG.json FOLDER

The vocabulary is the 256 bytes, then a space with every lower-case word of one letter, of two, of
three and so on until it is full. A word's merges add one letter at a time, so the text
" abc xyz" is two tokens if both words are in the vocabulary: benchmarks of a server get prompts
of a known number of tokens, and the tokenizer, the detokenizer and the wire carry about as many
bytes a token as with a real one. The ids of BOS and EOS are those of the config.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPACE = "Ġ"  # as the byte-level alphabet spells it
BOS, EOS = "<|bos|>", "<|eos|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def words(count: int) -> list[str]:
    """The first `count` lower-case words, shorter ones first."""
    lengths = range(1, 8)
    every = ("".join(letters) for n in lengths for letters in product(ascii_lowercase, repeat=n))
    return list(islice(every, count))


def make_tokenizer(config: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for a model's `vocab_size`.

    Raises:
        ValueError: the vocabulary is too small for 256 bytes, BOS and EOS.
    """
    size = config["vocab_size"]
    eos = config.get("eos_token_id")
    special = {
        BOS: config.get("bos_token_id"),
        EOS: eos[0] if isinstance(eos, list) else eos,
    }
    special = {token: token_id for token, token_id in special.items() if token_id is not None}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_words = size - len(alphabet) - len(set(special.values()))
    if num_words < 0:
        raise ValueError(f"a vocabulary of {size} has no room for the 256 bytes")
    pieces = iter([*alphabet, *(SPACE + word for word in words(num_words))])
    at_id = {token_id: token for token, token_id in special.items()}
    vocab = {at_id.get(token_id) or next(pieces): token_id for token_id in range(size)}
    merges = [((SPACE + word)[:-1], word[-1]) for word in words(num_words)]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in at_id.values()])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **{f"{token[2:5]}_token": token for token in at_id.values()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def main() -> None:
    """Make a folder of a config.json and its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a config.json, under any name")
    parser.add_argument("folder", type=Path, help="where it and the tokenizer go")
    args = parser.parse_args()
    make_tokenizer(json.loads(args.config.read_text()), args.folder)
    shutil.copy(args.config, args.folder / "config.json")


if __name__ == "__main__":
    main()
