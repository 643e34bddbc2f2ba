"""Command-line flags made of the fields of a settings dataclass, and a YAML file that sets them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml


class HelpFormatter(argparse.HelpFormatter):
    """Tells each flag's default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = (None, argparse.SUPPRESS, (), "", "==SUPPRESS==")
        if action.default in silent or action.default == {} or "default" in text:
            return text
        if isinstance(action.default, bool):
            return f"{text} (default: {'on' if action.default else 'off'})"
        return f"{text} (default: {action.default})"


def add_flags(
    parser: argparse._ActionsContainer, settings: type, *, skip: Iterable[str] = ()
) -> None:
    """A flag for each field: `max_num_seqs` becomes `--max-num-seqs`, switches get `--no-` too."""
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if field.name in skip:
            continue
        meta = field.metadata
        names = [meta["flag"] or "--" + field.name.replace("_", "-")]
        if meta["short"]:
            names.insert(0, meta["short"])
            names += ["-" + meta["short"]] if len(meta["short"]) > 2 else []  # -tp is --tp, too
        default = _default(field)
        options: dict[str, Any] = {"default": default, "help": meta["help"].replace("%", "%%")}
        options["dest"] = field.name
        kind = _kind(hints[field.name])
        if kind is bool:
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
            continue
        if typing.get_origin(kind) is tuple:
            options.update(nargs="+", type=str)
        else:
            options["type"] = _json_object if typing.get_origin(kind) is dict else kind
        if meta["choices"]:
            options["choices"] = [kind(choice) for choice in meta["choices"]]
        elif meta["metavar"]:
            options["metavar"] = meta["metavar"]
        parser.add_argument(*names, **options)


def collect(settings: type, args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `settings` from parsed flags."""
    values = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(settings)
        if hasattr(args, field.name)
    }
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def with_config_file(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The arguments, after those of the file that `--config FILE` names: later ones win.

    Raises:
        ValueError: the file is no table of known flags; names the unknown ones.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    file = finder.parse_known_args(argv)[0].config
    if file is None:
        return list(argv)
    try:
        content = yaml.safe_load(file.read_text("utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"cannot read --config {file}: {_yaml_problem(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error).replace("\n", " ")
        raise ValueError(f"cannot read --config {file}: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {file} must hold a table of flags")
    known = {
        name: action
        for action in parser._actions
        for name in action.option_strings
        if action.dest not in ("help", "config")
    }
    found = {f"--{str(key).lstrip('-').replace('_', '-')}": v for key, v in content.items()}
    unknown = sorted(name for name in found if name not in known)
    if unknown:
        raise ValueError(f"--config {file} has unknown keys: {', '.join(unknown)}")
    flags: list[str] = []
    for name, value in found.items():
        flags += _as_arguments(name, value, known[name])
    # A flag of one value ends a list of values before it.
    return [*flags, f"--config={file}", *argv]


def _as_arguments(name: str, value: Any, action: argparse.Action) -> list[str]:
    if value is None:
        return []
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{name} in the --config file must be true or false, got {value!r}")
        return [name if value else f"--no-{name[2:]}"]
    if isinstance(value, list):
        if not all(isinstance(item, str) for item in value):
            raise ValueError(f"{name} in the --config file must hold texts: quote each of them")
        return [name, *value]
    if isinstance(value, dict):
        try:
            return [f"{name}={json.dumps(value)}"]
        except TypeError as error:  # YAML has dates
            raise ValueError(f"{name} in the --config file: {error}") from error
    # YAML reads 0123 as 83 and yes as true. Nothing is quoted: the text may be a secret.
    if action.type is str and not isinstance(value, str):
        raise ValueError(f"{name} in the --config file must be a text: quote it")
    return [f"{name}={value}"]


def _yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the words of the file: one may be a secret."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return "it holds characters that YAML does not allow"
    problem = re.sub(r"'.{2,}'", "'...'", error.problem or "it is no YAML")
    line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
    return problem + line


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _kind(hint: Any) -> Any:
    """The type of a flag's value; of a union, the first that is not None and reads any text."""
    if isinstance(hint, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if str in kinds:
            return str if len(kinds) == 1 else _any_text
        return kinds[0]
    return hint


def _any_text(text: str) -> str:
    """A text that may be a number as well."""
    return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value
