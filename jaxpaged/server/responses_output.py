"""An answer as items of a response, and the events that tell how they come about."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.server.parsing.answer import Parts
from jaxpaged.server.parsing.calls import ToolCall
from jaxpaged.server.parsing.runs import Change, Run, Runs
from jaxpaged.server.protocol import TokenLogprob
from jaxpaged.server.responses_protocol import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

Event = tuple[str, dict[str, Any]]  # its name behind "response.", and what it holds


@dataclass
class OutputItems:
    """The items of one response."""

    items: list[OutputItem] = field(default_factory=list)
    _runs: Runs = field(default_factory=Runs)

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(run.text for run in self._runs.runs if run.kind == "content")

    @property
    def reasoning(self) -> str:
        """What was thought."""
        return "".join(run.text for run in self._runs.runs if run.kind == "reasoning")

    @property
    def calls(self) -> list[ToolCall]:
        return [run.call for run in self._runs.runs if run.call is not None]

    def feed(self, parts: Parts, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Take what is new of the answer.

        Args:
            logprobs: of the tokens that are new; they belong to the content, if there is any.
        """
        for change in self._runs.feed(parts):
            yield from self._tell(change, logprobs if change.what == "add" else ())

    def close(self, logprobs: Sequence[TokenLogprob] = (), *, complete: bool) -> Iterator[Event]:
        """End the last item; there is a message at least, be it empty.

        Args:
            logprobs: of last tokens that are no text.
        """
        for change in self._runs.close():
            yield from self._tell(change, logprobs, complete)
        if not self.items:
            run = Run("content")
            yield from self._tell(Change("begin", 0, run), ())
            yield from self._tell(Change("end", 0, run), logprobs, complete)

    def _tell(
        self, change: Change, logprobs: Sequence[TokenLogprob], complete: bool = True
    ) -> Iterator[Event]:
        if change.what == "begin":
            self.items.append(_item(change.run))
            yield "output_item.added", {"output_index": change.place, "item": plain(self.items[-1])}
        item = self.items[change.place]
        where = {"item_id": item.id, "output_index": change.place}
        if isinstance(item, FunctionCallItem):
            if change.what == "begin":
                assert change.run.call is not None
                item.arguments = change.run.call.arguments
                yield "function_call_arguments.delta", {**where, "delta": item.arguments}
                told = {"name": item.name, "arguments": item.arguments}
                yield "function_call_arguments.done", {**where, **told}
        else:
            yield from _tell_text(item, change, {**where, "content_index": 0}, logprobs)
        if change.what == "end":
            item.status = "completed" if complete else "incomplete"
            yield "output_item.done", {"output_index": change.place, "item": plain(item)}


def _tell_text(
    item: OutputMessage | ReasoningItem,
    change: Change,
    where: dict[str, Any],
    logprobs: Sequence[TokenLogprob],
) -> Iterator[Event]:
    if change.what == "begin":
        if isinstance(item, OutputMessage):
            item.content = [OutputText()]
        else:
            item.content = [ReasoningText()]
        yield "content_part.added", {**where, "part": plain(item.content[0])}
        return
    part = item.content[0]
    scored: dict[str, Any] = {}
    if isinstance(part, OutputText):
        part.logprobs.extend(logprobs)
        shown = logprobs if change.what == "add" else part.logprobs
        scored["logprobs"] = [plain(entry) for entry in shown]
    name = f"{part.type}.delta" if change.what == "add" else f"{part.type}.done"
    if change.what == "add":
        yield name, {**where, "delta": change.text, **scored}
        return
    part.text = change.run.text
    yield name, {**where, "text": part.text, **scored}
    yield "content_part.done", {**where, "part": plain(part)}


def _item(run: Run) -> OutputItem:
    name = uuid.uuid4().hex
    if run.call is not None:
        return FunctionCallItem(id=f"fc_{name}", call_id=run.call.id, name=run.call.name)
    return (
        OutputMessage(id=f"msg_{name}") if run.kind == "content" else ReasoningItem(id=f"rs_{name}")
    )


def plain(model: Any) -> dict[str, Any]:
    """A pydantic model as plain data."""
    return model.model_dump(mode="json")
