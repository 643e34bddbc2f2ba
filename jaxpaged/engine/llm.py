"""The Python API: an engine in this process."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from jax._src import xla_bridge  # the one place that tells whether a backend runs already
from tqdm import tqdm

from jaxpaged import model_files
from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine_core import EngineCore
from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.grammar_checker import GrammarChecker
from jaxpaged.engine.input_processor import InputProcessor, Prompt
from jaxpaged.engine.messages import AddRequest, EngineInfo
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.engine.tokenizer import Tokenizer, generation_defaults
from jaxpaged.outputs import RequestOutput
from jaxpaged.parallel.hosts import end_process
from jaxpaged.runtime.memory import claim_memory
from jaxpaged.runtime.multi_host import join_hosts
from jaxpaged.sampling_params import SamplingParams

log = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[dict[str, Any]]


class LLM:
    """A model ready to generate; every field of `EngineConfig` is a keyword.

    Usable as a context manager. One instance serves many calls, one at a time. An exception or
    Ctrl-C in the middle of a call aborts the call's requests and leaves the instance usable.

    Args:
        model: folder, .gguf file or hub id; without it the built-in demo model runs.

    Raises:
        ValueError, OSError: settings, model or memory do not fit together; one line.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.config = EngineConfig(model=model, **settings)
        if self.config.data_parallel_size > 1:
            raise ValueError(
                "an LLM is one engine in this process: data_parallel_size "
                f"{self.config.data_parallel_size} needs `jaxpaged serve` or AsyncLLM"
            )
        if self.config.host_id:
            raise ValueError("only host 0 makes an LLM: the others run `jaxpaged generate`")
        if xla_bridge.backends_are_initialized():
            log.info("the JAX backend runs already: its own memory limit holds")
        else:
            claim_memory(self.config)
        folder = model_files.resolve_model(
            self.config.model, self.config.revision, self.config.download_dir
        )
        self.tokenizer: Tokenizer | None = None
        if not self.config.skip_tokenizer_init:
            named = self.config.tokenizer
            self.tokenizer = Tokenizer.load(
                folder if named is None else model_files.resolve_model(named), folder
            )
        self._defaults = (
            generation_defaults(folder) if self.config.generation_config == "auto" else {}
        )
        group = join_hosts(self.config, end_process)
        self._core = EngineCore(self.config, group=group)
        if self._core.info.platform == "gpu":
            gc.collect()  # what tracing has left: now, and not for tenths of a second among steps
        self._grammars = None if self.tokenizer is None else GrammarChecker(self.tokenizer.file)
        self._inputs = InputProcessor(self._core.info, self.tokenizer, self._grammars)
        self._outputs = OutputProcessor(self.tokenizer)
        self._ids = itertools.count()
        self._in_use = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Give back the device memory; the instance is of no use afterwards."""
        if self._grammars is not None:
            self._grammars.close()
        self._core.end()
        del self._core

    @property
    def info(self) -> EngineInfo:
        """What the engine settled on: lengths, pages, buckets, start-up seconds."""
        return self._core.info

    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a call that names none: the model's own where it has some."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, batched as memory allows.

        Args:
            prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a list of
                any of these.
            sampling_params: for all prompts, or one each.
            use_tqdm: show progress.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            BadRequestError: a prompt or its parameters; nothing was generated.
        """
        requests = self._requests(_as_list(prompts), sampling_params)
        finished = {
            output.request_id: output for output in self._finished(requests, use_tqdm=use_tqdm)
        }
        return [finished[request.request_id] for request, _ in requests]

    def generate_as_completed(
        self, prompts: Sequence[Prompt], sampling_params: Params = None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but yields (index of the prompt, output) as each one finishes."""
        requests = self._requests(prompts, sampling_params)
        index = {request.request_id: i for i, (request, _) in enumerate(requests)}
        for output in self._finished(requests, use_tqdm=False):
            yield index[output.request_id], output

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt; yields what is new of a choice at each step."""
        yield from self._run(self._requests([prompt], sampling_params), delta=True)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; max_tokens None means: as long as it fits.

        Args:
            messages: {"role": ..., "content": ...} each.
            template: arguments of `Tokenizer.render_chat`.
        """
        many = bool(messages) and not isinstance(messages[0], dict)
        conversations: Sequence[Any] = messages if many else [messages]
        prompts = [self._chat_prompt(conversation, template) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template: Any
    ) -> Iterator[RequestOutput]:
        """Like `chat` for one conversation; yields what is new at each step."""
        yield from self.stream(self._chat_prompt(messages, template), sampling_params)

    def _chat_prompt(self, messages: Messages, template: dict[str, Any]) -> Prompt:
        if self.tokenizer is None:
            raise BadRequestError("a chat needs a tokenizer, and none is loaded")
        text = self.tokenizer.render_chat(messages, **template)
        # The template names its BOS itself.
        return {"prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def _requests(
        self, prompts: Sequence[Prompt], sampling_params: Params
    ) -> list[tuple[AddRequest, str | None]]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(sampling_params)} sampling params for {len(prompts)} prompts")
        return [
            (self._inputs.request(str(next(self._ids)), prompt, params), _text(prompt))
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    def _finished(
        self, requests: list[tuple[AddRequest, str | None]], *, use_tqdm: bool
    ) -> Iterator[RequestOutput]:
        made = 0
        with tqdm(total=len(requests), desc="Generating", disable=not use_tqdm) as bar:
            for output in self._run(requests, delta=False):
                made += sum(len(choice.token_ids) for choice in output.outputs)
                elapsed = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{made / elapsed:.0f} tok/s", refresh=False)
                bar.update()
                yield output

    def _run(
        self, requests: list[tuple[AddRequest, str | None]], *, delta: bool
    ) -> Iterator[RequestOutput]:
        """What is new of a choice at each step, or each request once it is finished."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "this LLM is in the middle of another call: finish or close that iterator first, "
                "or use AsyncLLM for many callers"
            )
        try:
            for request, text in requests:
                self._outputs.add(request, text, delta=delta)
                self._core.add(request)
            while self._outputs.num_requests:
                for news in self._core.step():
                    output, tell = self._outputs.process(news)
                    if tell is not None:
                        self._core.finish(tell.request_id, tell.index, tell.num_tokens)
                    if output is not None and (delta or output.finished):
                        yield output
        finally:
            # After an error, Ctrl-C or an abandoned iterator: leave nothing behind.
            for request, _ in requests:
                self._outputs.abort(request.request_id)
                self._core.abort(request.request_id)
            while self._core.has_work:
                self._core.step()
            self._in_use.release()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt as a list of one; a list of integers is one prompt."""
    single = isinstance(prompts, (str, dict)) or (bool(prompts) and isinstance(prompts[0], int))
    return [prompts] if single else prompts  # type: ignore[list-item, return-value]


def _text(prompt: Prompt) -> str | None:
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt")  # type: ignore[assignment]
    return prompt if isinstance(prompt, str) else None
