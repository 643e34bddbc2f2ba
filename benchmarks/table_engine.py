"""An engine core that costs nothing: every request gets the tokens of a table, a token a step.

Takes the place of `jaxpaged.engine.core_process`, with `--step-seconds` before its arguments.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec
import zmq

from jaxpaged.config import EngineConfig
from jaxpaged.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineInfo,
    EngineStats,
    FinishSequence,
    FrontMessage,
    SequenceOutput,
    Shutdown,
    StepOutputs,
)
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.model_files import resolve_model

MAX_MODEL_LEN = 32768
VOCAB = 1 << 20  # larger than any
TEXT = (
    "the king shall speak of love and night to him that hath no crown, and when the morning comes "
    "he will have walked from one end of his small country to the other without a word. "
)


def table(config: EngineConfig) -> list[int]:
    """Token ids of a text."""
    folder = resolve_model(config.model, config.revision, config.download_dir)
    return Tokenizer.load(folder).encode(TEXT, add_special_tokens=False)


def serve(
    source: zmq.Socket, sinks: list[zmq.Socket], tokens: list[int], step_seconds: float
) -> None:
    """Answer until told to end; a step begins `step_seconds` after the last one."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FrontMessage)
    running: dict[str, tuple[AddRequest, int]] = {}  # with the tokens made
    due = time.perf_counter()
    while True:
        while source.poll(0 if running else 100):
            match decoder.decode(source.recv()):
                case Shutdown():
                    return
                case AddRequest() as request:
                    running[request.request_id] = (request, 0)
                case AbortRequests(request_ids):
                    for request_id in request_ids:
                        running.pop(request_id, None)
                case FinishSequence(request_id):
                    running.pop(request_id, None)
        if not running:
            continue
        outputs: list[list[SequenceOutput]] = [[] for _ in sinks]
        for request_id, (request, made) in list(running.items()):
            last = made + 1 == request.params.max_tokens
            number = int(request_id.rpartition("-")[2])
            outputs[number % len(sinks)].append(
                SequenceOutput(
                    request_id=request_id,
                    index=0,
                    token_ids=[tokens[made % len(tokens)]],
                    finish_reason="length" if last else None,
                )
            )
            if last:
                del running[request_id]
            else:
                running[request_id] = (request, made + 1)
        made = sum(map(len, outputs))
        stats = EngineStats(num_running=len(running), iteration_tokens=made, bucket_tokens=made)
        for sink, share in zip(sinks, outputs, strict=True):
            sink.send(encoder.encode(StepOutputs(share, stats)))
        due = max(due + step_seconds, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", required=True, nargs="+")
    parser.add_argument("--replica", type=int)
    args = parser.parse_args()
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    context = zmq.Context()
    source, sinks = context.socket(zmq.PULL), []
    source.bind(args.input)
    for address in args.output:
        sinks.append(context.socket(zmq.PUSH))
        sinks[-1].set_hwm(0)
        sinks[-1].connect(address)
    ready = EngineInfo(
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB,
        num_pages=1 << 16,
        page_size=16,
        max_logprobs=config.max_logprobs,
        platform="none",
        attention_backend="none",
        dtype="none",
        lm_head_dtype="none",
        buckets=["any"],
        startup_seconds={"total": 0.0},
    )
    tokens = table(config)
    for sink in sinks:
        sink.send(msgspec.msgpack.encode(ready))
    serve(source, sinks, tokens, args.step_seconds)
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
