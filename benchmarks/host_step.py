"""What the host does for a decode step, without a device: microseconds of each part.

    python -m benchmarks.host_step

The real engine core, scheduler and batch builder, with the plan of a GPU; only the device is
missing: its tokens are random and there at once, and JAX dispatches nothing. What JAX takes for a
call with as many arrays as a forward step has is timed apart, of an executable that does nothing.
The front end's part runs in another process when serving, and is shown beside: `front end` streams
the text of every token, `generate` is what `LLM.generate` does without a tokenizer, in the core's
own process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from benchmarks.common import markdown, write_results
from benchmarks.make_tokenizer import make_tokenizer
from jaxpaged.config import EngineConfig
from jaxpaged.core.scheduler import SchedulerOutput
from jaxpaged.engine import engine_core
from jaxpaged.engine.engine_core import EngineCore
from jaxpaged.engine.messages import AddRequest, StepOutputs
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.models import load_spec
from jaxpaged.models.decoder import Decoder, abstract_params
from jaxpaged.models.spec import ModelSpec
from jaxpaged.runtime.batch_builder import BatchBuilder, StepInput
from jaxpaged.runtime.model_runner import InFlight, StepResult
from jaxpaged.runtime.plan import EnginePlan, make_plan
from jaxpaged.runtime.programs import abstract_states
from jaxpaged.runtime.slot_table import SlotTable
from jaxpaged.runtime.startup import Started
from jaxpaged.sampling_params import SamplingParams

MODEL = Path(__file__).parent / "models" / "qwen2.5-7b.json"
MAX_MODEL_LEN = 2048
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN // 2, ignore_eos=True)
FILTERED = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, max_tokens=MAX_MODEL_LEN // 2)


class Stopwatch:
    """Seconds of each part of each step since the last `clear`."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its calls timed under `name`."""

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds[name].append(time.perf_counter() - start)
            return result

        return call


class HostRunner:
    """A ModelRunner's host side; what it would dispatch is dropped."""

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.late_compilations = 0
        self._slots = SlotTable(plan.max_num_seqs, plan.vocab)
        self._builder = BatchBuilder(plan.shapes, plan.buckets, self._slots)
        self._rng = np.random.default_rng(0)

    def forward(self, scheduled: SchedulerOutput) -> StepInput:
        """Pack a step and its sampling."""
        self._builder.admit(scheduled.admitted)
        self._slots.admit(scheduled.admitted)
        return self._builder.step(scheduled)

    def sample(self, scheduled: SchedulerOutput, step: StepInput, masks: Any = None) -> InFlight:
        """Nothing is left to pack for the variants that ride along with the step."""
        return InFlight(scheduled, None, [], time.perf_counter())

    def collect(self, step: InFlight) -> StepResult:
        """Random tokens for the rows that sample."""
        count = sum(item.samples for item in step.scheduled.sequences)
        token_ids = self._rng.integers(0, self.plan.vocab, count).tolist()
        return StepResult(token_ids, [], None, None, None, None)


def settings_of(model: Path, batch: int) -> tuple[ModelSpec, EngineConfig, EnginePlan]:
    """Of an engine for `batch` sequences on a GPU that is not there."""
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=batch,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=batch * MAX_MODEL_LEN // 16,
    )
    spec = load_spec(json.loads(model.read_text()))
    plan = make_plan(config, spec, jnp.dtype(jnp.bfloat16), "gpu", serving=True)
    return spec, config, plan.with_pages(config, 0)


def make_core(model: Path, batch: int) -> EngineCore:
    """An engine core without a device."""
    _, config, plan = settings_of(model, batch)
    runner: Any = HostRunner(plan)
    started = Started(runner, "none", "gpu", "bfloat16", "bfloat16", {})
    with mock.patch.object(engine_core, "start_runner", lambda *_, **__: started):
        return EngineCore(config)


def measure_call(model: Path, calls: int) -> dict[str, float]:
    """Microseconds of a call that has a forward step's arrays, of one number each."""
    spec, _, plan = settings_of(model, 1)
    decoder = Decoder(spec, plan.kv, jnp.bfloat16)
    states, _ = abstract_states(decoder, plan, jax.devices()[0])
    abstract = tuple(jax.tree.leaves(nn.meta.unbox(abstract_params(decoder)))), states
    weights, state = jax.tree.map(lambda _: jnp.zeros(()), abstract)
    step = jax.jit(lambda weights, state: state, donate_argnums=1, keep_unused=True)
    compiled, watch = step.lower(weights, state).compile(), Stopwatch()
    call = watch.timed("call", compiled)
    for _ in range(calls):
        state = call(weights, state)
    jax.block_until_ready(state)
    return {
        "arrays": len(jax.tree.leaves((weights, state))),
        "us": 1e6 * median(watch.seconds["call"]),
    }


def measure(
    core: EngineCore, tokenizer: Tokenizer, params: SamplingParams, batch: int, args: Any
) -> dict[str, float]:
    """Median microseconds of each part of a decode step of `batch` sequences."""
    watch, encoder = Stopwatch(), msgspec.msgpack.Encoder()
    rng = np.random.default_rng(0)
    front, whole = OutputProcessor(tokenizer), OutputProcessor(None)
    for number in range(batch):
        prompt = rng.integers(0, core.info.vocab_size, args.context).tolist()
        request = AddRequest(
            request_id=str(number), prompt_token_ids=prompt, params=params, arrival_time=0.0
        )
        front.add(request, None, delta=True)
        whole.add(request, None, delta=False)
        core.add(request)
    while core.stats().num_running < batch:
        core.step()
    for _ in range(3):  # the last chunks, the first tokens
        core.step()
    scheduler: Any = core._scheduler
    runner: Any = core._runner
    with (
        mock.patch.object(scheduler, "schedule", watch.timed("schedule", scheduler.schedule)),
        mock.patch.object(scheduler, "update", watch.timed("update", scheduler.update)),
        mock.patch.object(runner, "forward", watch.timed("build", runner.forward)),
        mock.patch.object(runner, "collect", watch.timed("no device", runner.collect)),
    ):
        step = watch.timed("step", core.step)
        encode = watch.timed("hand over", lambda: encoder.encode(StepOutputs(news, core.stats())))
        take = watch.timed("generate", lambda: [whole.process(item) for item in news])
        read = watch.timed("front end", lambda: [front.process(item) for item in news])
        for _ in range(args.steps):
            news = step()
            assert len(news) == batch
            encode()
            take()
            read()
    for number in range(batch):
        core.abort(str(number))
    while core.has_work:
        core.step()
    return _parts(watch.seconds)


def _parts(seconds: dict[str, list[float]]) -> dict[str, float]:
    us = {name: np.array(values) * 1e6 for name, values in seconds.items()}
    apart = ("schedule", "build", "update")
    us["messages"] = us["step"] - us["no device"] - sum(us[name] for name in apart)
    us["all"] = us["step"] - us["no device"] + us["hand over"]
    names = (*apart, "messages", "hand over", "all", "generate", "front end")
    return {f"{name} us": float(median(us[name])) for name in names}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a config.json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--name", default="host_step", help="of the file in benchmarks/results")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(json.loads(args.model.read_text()), Path(folder))
        tokenizer = Tokenizer.load(Path(folder))
    for batch in args.batch:
        core = make_core(args.model, batch)
        for sampling, params in (("greedy", GREEDY), ("top-k, top-p", FILTERED)):
            figures = measure(core, tokenizer, params, batch, args)
            rows.append({"batch": batch, "sampling": sampling, **figures})
    call = measure_call(args.model, args.steps)
    print(markdown(rows), markdown([{f"call of a step, {key}": n for key, n in call.items()}]))
    path = write_results(
        args.name,
        {"model": args.model.stem, "context": args.context, "rows": rows, "call": call},
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
