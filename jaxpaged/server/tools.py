"""What a request wants of its tools: which are offered, which must be called, how that is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.sampling_params import StructuredOutputs
from jaxpaged.server.parsing import CALL_FORMATS
from jaxpaged.server.parsing.calls import CallParser, call_id
from jaxpaged.server.parsing.enforced import EnforcedCalls
from jaxpaged.server.tool_protocol import FunctionDefinition, NamedToolChoice, Tool, ToolChoice
from jaxpaged.server.tool_schema import arguments_schema, calls_schema
from jaxpaged.server_config import ServerConfig


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request.

    Args:
        offered: what the template shows; empty if none may be called.
        choice: auto, required or the function that must be called; none without tools.
        single: at most one call.
        format: how the model writes calls, a name of `CALL_FORMATS`; None: nobody said.
    """

    offered: Sequence[Tool]
    choice: ToolChoice
    single: bool
    format: str | None

    @property
    def enforced(self) -> bool:
        """Whether the whole answer is made of calls, by grammar."""
        return self.choice not in ("none", "auto")

    @property
    def overrides(self) -> dict[str, Any]:
        """What sampling parameters follow.

        Raises:
            BadRequestError: a schema that no grammar can follow.
        """
        if self.enforced:
            try:
                form = StructuredOutputs(json=self._schema())
            except RecursionError:
                raise BadRequestError(
                    "a tool's parameters are nested too deeply", "tools"
                ) from None
            return {"structured_outputs": form, "stop": ()}  # no string cuts a call
        # Some models mark calls with special tokens.
        return {"skip_special_tokens": False} if self.choice == "auto" else {}

    def parser(self) -> CallParser | None:
        """Reads the calls of one answer; None: there are none."""
        form = None if self.format is None else CALL_FORMATS[self.format]
        if self.enforced:
            named = self.choice.function.name if isinstance(self.choice, NamedToolChoice) else None
            return EnforcedCalls(named, call_id if form is None else form.call_id)
        if self.choice == "auto":
            assert form is not None
            return form.parser(frozenset(self._functions()))
        return None

    def _functions(self) -> dict[str, FunctionDefinition]:
        return {tool.function.name: tool.function for tool in self.offered}

    def _schema(self) -> dict[str, Any]:
        functions = self._functions()
        if isinstance(self.choice, NamedToolChoice):
            return arguments_schema(functions[self.choice.function.name])
        return calls_schema(list(functions.values()), single=self.single)


def read_tools(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    config: ServerConfig,
) -> ToolUse:
    """What a request's fields say; without a choice the model decides.

    Raises:
        BadRequestError: they contradict each other, or the server cannot read the model's calls.
    """
    tools = tools or ()
    names = [tool.function.name for tool in tools]
    for name, count in Counter(names).items():
        if count > 1:
            raise BadRequestError(f"tools has two functions named {name!r}", "tools")
    if not tools and choice not in (None, "none", "auto"):
        raise BadRequestError("tool_choice needs tools to choose from", "tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise BadRequestError(
            f"tool_choice names {choice.function.name!r}, which is not among the tools",
            "tool_choice",
        )
    if not tools or choice == "none":
        return ToolUse((), "none", False, None)
    if choice in (None, "auto") and not config.enable_auto_tool_choice:
        raise BadRequestError(
            "tools with tool_choice auto need a server that was started with "
            "--enable-auto-tool-choice and --tool-call-parser; tool_choice required, none or a "
            "named function does without",
            "tool_choice",
        )
    return ToolUse(tools, choice or "auto", parallel is False, config.tool_call_parser)
