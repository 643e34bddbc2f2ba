"""The parts of the benchmarks that need no engine: lengths, tokenizer, percentiles, tables."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import evenly, markdown, percentiles
from benchmarks.http_client import Answer, complete
from benchmarks.make_tokenizer import make_tokenizer
from benchmarks.serving import TextMaker, summary
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.model_files import DEMO_MODEL
from jaxpaged.planning.lengths import MAX_TOTAL, Lengths, fixed, random_prompts, sharegpt

SHARES = (10, 25, 50, 75, 90, 95, 99)
PROMPT = (12, 22, 130, 398, 656, 802, 947)
OUTPUT = (10, 24, 126, 320, 504, 691, 967)


def test_lengths_have_the_percentiles_of_sharegpt():
    lengths = sharegpt(4096, seed=1)
    prompts = np.array([item.prompt for item in lengths])
    outputs = np.array([item.output for item in lengths])
    np.testing.assert_allclose(np.percentile(prompts, SHARES), PROMPT, rtol=0.02)
    np.testing.assert_allclose(np.percentile(outputs, SHARES), OUTPUT, rtol=0.03)
    np.testing.assert_allclose([prompts.mean(), outputs.mean()], [242, 208], rtol=0.04)
    assert prompts.min() >= 4 and prompts.max() <= 1024 and outputs.min() >= 1
    assert (prompts + outputs).max() <= MAX_TOTAL
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.1


def test_lengths_follow_their_seed():
    assert sharegpt(64, seed=3) == sharegpt(64, seed=3) != sharegpt(64, seed=4)


def test_random_prompts_have_their_lengths():
    prompts = random_prompts([Lengths(3, 1), *fixed(2, 5, 1)], 100, np.random.default_rng(0))
    assert [len(prompt) for prompt in prompts] == [3, 5, 5]
    assert prompts[1] != prompts[2]
    assert all(0 <= token_id < 100 for prompt in prompts for token_id in prompt)


def test_percentiles_are_named():
    assert percentiles("TTFT", range(101)) == {"TTFT p50": 50, "TTFT p90": 90, "TTFT p99": 99}


def test_evenly():
    assert evenly(16, 4) == [2, 6, 10, 14]
    assert evenly(2, 4) == [0, 1]


def test_table():
    rows = [{"name": "a", "x": 1234.5}, {"name": "b", "x": 0.012345}]
    assert markdown(rows) == "| name | x |\n| --- | --- |\n| a | 1,234 |\n| b | 0.01235 |"


def test_synthetic_tokenizer(tmp_path: Path):
    config = {"vocab_size": 1000, "bos_token_id": 3, "eos_token_id": [990, 991]}
    make_tokenizer(config, tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == [990]
    assert len({tokenizer.token(token_id) for token_id in range(1000)}) == 1000
    text = TextMaker(tmp_path, seed=0).text(50)
    assert len(tokenizer.encode(text)) == 50
    assert tokenizer.decode(tokenizer.encode("héllo, wörld")) == "héllo, wörld"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "user: hi\nassistant:"


def test_synthetic_tokenizer_needs_room_for_bytes(tmp_path: Path):
    with pytest.raises(ValueError, match="a vocabulary of 200 has no room"):
        make_tokenizer({"vocab_size": 200}, tmp_path)


def test_texts_for_the_built_in_model():
    text = TextMaker(DEMO_MODEL, seed=0).text(40)
    assert len(Tokenizer.load(DEMO_MODEL).encode(text, add_special_tokens=False)) == 40


def test_summary_counts_what_keeps_the_limits():
    usage = {"completion_tokens": 3}
    answers = [
        Answer(sent=1.0, times=[1.1, 1.11, 1.12], usage=usage),
        Answer(sent=1.0, times=[1.9, 1.91, 1.92], usage=usage),  # its first token is late
        Answer(sent=1.0, times=[1.1, 1.2, 1.4], usage=usage),  # 150 ms a token
        Answer(sent=1.0, error="503"),
    ]
    figures = summary(answers, seconds=2.0, slo_ttft_ms=500, slo_itl_ms=50)
    assert figures["failed"] == 1
    assert figures["output tok/s"] == 4.5
    assert (figures["requests/s"], figures["goodput/s"]) == (1.5, 0.5)
    assert figures["TTFT p50"] == pytest.approx(100)
    assert figures["TPOT p50"] == pytest.approx(10)
    assert figures["E2E p50"] == pytest.approx(400)


CHUNK = 'data: {"choices": [{"text": "hi"}]}\n\n'
USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'


def answer_of(*pieces: str, status: str = "200 OK") -> Answer:
    """What the client makes of an answer that comes in these pieces."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = json.loads(await reader.readexactly(int(head.split(b"Length: ")[1].split()[0])))
        assert body["prompt"] == "x" and body["stream"]
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n{piece}\r\n".encode())
            await writer.drain()
        writer.write(b"0\r\n\r\n" if pieces else b"")
        writer.close()

    async def run() -> Answer:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await complete(f"http://127.0.0.1:{port}", {"prompt": "x"})

    return asyncio.run(asyncio.wait_for(run(), 10))


def test_client_reads_a_stream():
    answer = answer_of(CHUNK, CHUNK[:9], CHUNK[9:] + USAGE)
    assert (len(answer.times), answer.num_tokens, answer.error) == (2, 2, None)


def test_client_tells_of_failures():
    assert answer_of('{"error": "busy"}', status="503 X").error == '503: {"error": "busy"}'
    assert answer_of('data: {"error":{}}\n\n').error == "{}"
    assert answer_of().error.startswith("the stream broke off")
