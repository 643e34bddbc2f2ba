"""The command line: `jaxpaged serve | generate | chat | convert | plan | calibrate-kv`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jaxpaged
from jaxpaged.config import EngineConfig
from jaxpaged.engine.errors import EngineStartError
from jaxpaged.error_log import log_to_stderr
from jaxpaged.flags import HelpFormatter, add_flags, collect, with_config_file
from jaxpaged.planning.options import ENGINE_SETTINGS, PlanOptions
from jaxpaged.server_config import ServerConfig

log = logging.getLogger(__name__)

CALIBRATION_TOKENS = 512  # that see each other
API_KEY_VARIABLE = "JAXPAGED_API_KEY"
MODEL_HELP = "folder, .gguf file or hub id"
ENGINE_TITLE = "engine: model, memory, scheduling"
SERVER_TITLE = "server: HTTP"
SAMPLING = {  # flags of generate and chat: their type and what --help says
    "max_tokens": (int, "most tokens of an answer"),
    "temperature": (float, "0: always the most likely token"),
    "top_p": (float, "share of the probability to choose from"),
    "top_k": (int, "number of most likely tokens to choose from"),
    "min_p": (float, "least probability, relative to the most likely token's"),
    "repetition_penalty": (float, "above 1: disfavour tokens that occurred"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 2 if settings or files don't fit, 1 if it failed."""
    parser, commands = _parsers()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in commands:
            name, *rest = arguments
            arguments = [name, *with_config_file(commands[name], rest)]
        args = parser.parse_args(arguments)
        # Whatever host 0 does: the others load neither a server nor, in this process, JAX.
        return _follow(args) if getattr(args, "host_id", 0) else args.run(args)
    except (ValueError, OSError, ImportError) as error:
        log.debug("%s", error, exc_info=True)
        print(f"jaxpaged: {_one_line(error)}", file=sys.stderr)
        return 2
    except EngineStartError as error:
        print(f"jaxpaged: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="jaxpaged", description="LLM inference in JAX, by the names that vLLM's users know."
    )
    parser.add_argument("--version", action="version", version=f"jaxpaged {jaxpaged.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    commands = {}
    for name, run, text in (
        ("serve", _serve, "serve a model over HTTP by OpenAI's protocol"),
        ("generate", _generate, "continue prompts"),
        ("chat", _chat, "talk to a model in the terminal"),
        ("convert", _convert, "write a model's weights as an Orbax checkpoint, which loads faster"),
        ("plan", _plan, "tell what a model would do on GPUs that need not be here"),
        ("calibrate-kv", _calibrate_kv, "measure a text's keys and values, as scales of fp8 pages"),
    ):
        command = subparsers.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(run=run)
        commands[name] = command
    for name in ("serve", "generate", "chat"):
        command = commands[name]
        command.add_argument(
            "model_tag",
            nargs="?",
            metavar="MODEL",
            help="the same as --model; without a model the built-in demo model runs",
        )
        command.add_argument(
            "--config", metavar="FILE", help="YAML file with any of these flags; flags here win"
        )
        add_flags(command.add_argument_group(ENGINE_TITLE), EngineConfig)
    add_flags(commands["serve"].add_argument_group(SERVER_TITLE), ServerConfig)
    _add_sampling(commands)
    commands["convert"].add_argument("model_tag", metavar="MODEL", help=MODEL_HELP)
    commands["convert"].add_argument("out", metavar="OUT", type=Path, help="folder to write")
    commands["convert"].add_argument("--revision", help="branch, tag or commit of a hub model")
    commands["convert"].add_argument("--download-dir", help="where hub files are kept")
    _add_plan(commands["plan"])
    calibrate = commands["calibrate-kv"]
    calibrate.add_argument("model_tag", metavar="MODEL", help=MODEL_HELP)
    calibrate.add_argument(
        "out", metavar="OUT", type=Path, help=".safetensors or .json for --kv-cache-scales"
    )
    calibrate.add_argument(
        "--text", metavar="FILE", type=Path, help="UTF-8 file to read (default: standard input)"
    )
    return parser, commands


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model_tag", metavar="MODEL", help=f"{MODEL_HELP}, or a config.json under any name"
    )
    add_flags(command.add_argument_group("what to plan for"), PlanOptions)
    others = {field.name for field in dataclasses.fields(EngineConfig)} - set(ENGINE_SETTINGS)
    add_flags(command.add_argument_group("settings of the engine"), EngineConfig, skip=others)


def _add_sampling(commands: dict[str, argparse.ArgumentParser]) -> None:
    for name in ("generate", "chat"):
        group = commands[name].add_argument_group("sampling (default: the model's own)")
        for field, (kind, text) in SAMPLING.items():
            group.add_argument(f"--{field.replace('_', '-')}", type=kind, help=text)
        group.add_argument("--stop", nargs="+", help="strings that end an answer")
    commands["generate"].add_argument(
        "--prompt", nargs="+", help="texts to continue (default: standard input, as one text)"
    )
    commands["chat"].add_argument("--system", help="system message of the conversation")


def _engine_settings(args: argparse.Namespace) -> dict:
    settings = collect(EngineConfig, args)
    named = settings["model"]
    if args.model_tag is not None:
        if named is not None and named != args.model_tag and args.config is None:
            raise ValueError(f"two models are named: {args.model_tag!r} and --model {named!r}")
        settings["model"] = args.model_tag
    return settings


def _sampling(args: argparse.Namespace) -> dict:
    names = (*SAMPLING, "stop")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _follow(args: argparse.Namespace) -> int:
    from jaxpaged.engine.follower import follow

    return follow(EngineConfig(**_engine_settings(args)))


def _serve(args: argparse.Namespace) -> int:
    from jaxpaged.server.service import serve

    log_to_stderr(args.uvicorn_log_level)
    settings = collect(ServerConfig, args)
    if not settings["api_key"] and API_KEY_VARIABLE in os.environ:
        settings["api_key"] = (os.environ[API_KEY_VARIABLE],)
    return serve(EngineConfig(**_engine_settings(args)), ServerConfig(**settings))


def _generate(args: argparse.Namespace) -> int:
    from jaxpaged.terminal import generate

    log_to_stderr("warning")
    prompts = args.prompt or [sys.stdin.read()]
    return generate(_engine_settings(args), prompts, _sampling(args))


def _chat(args: argparse.Namespace) -> int:
    from jaxpaged.terminal import chat

    log_to_stderr("warning")
    return chat(_engine_settings(args), args.system, _sampling(args))


def _convert(args: argparse.Namespace) -> int:
    from jaxpaged import model_files
    from jaxpaged.runtime.checkpoint import convert

    folder = model_files.resolve_model(args.model_tag, args.revision, args.download_dir)
    convert(folder, args.out)
    print(f"wrote {args.out}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    import jax

    from jaxpaged.gguf.header import SUFFIX
    from jaxpaged.model_files import find_config
    from jaxpaged.models import load_spec
    from jaxpaged.planning.predict import predict
    from jaxpaged.planning.report import as_json, as_text

    log_to_stderr("error")
    jax.config.update("jax_platforms", "cpu")  # shapes alone are asked for: leave GPUs in peace
    options = PlanOptions(**collect(PlanOptions, args))
    config = EngineConfig(**collect(EngineConfig, args))
    found_config = find_config(args.model_tag, config.revision, config.download_dir)
    spec = load_spec(found_config, config.quantization, config.quantize_lm_head)
    found = predict(spec, config, options)
    file = Path(args.model_tag)
    bare = file.is_file() and file.suffix != SUFFIX  # serve wants more than a config.json
    model = "MODEL" if bare else args.model_tag
    if options.json:
        print(json.dumps(as_json(model, config, options, found), indent=1))
    else:
        print(as_text(model, config, options, found))
    return 0 if found.fits else 1


def _calibrate_kv(args: argparse.Namespace) -> int:
    from jaxpaged import model_files
    from jaxpaged.engine.tokenizer import Tokenizer
    from jaxpaged.models import load_spec
    from jaxpaged.runtime.calibration import calibrate
    from jaxpaged.runtime.kv_scales import write_scales
    from jaxpaged.runtime.teacher_forcing import TeacherForced

    log_to_stderr("warning")
    text = args.text.read_text() if args.text else sys.stdin.read()
    if not text.strip():
        raise ValueError("the text is empty: there is nothing to measure")
    folder = model_files.resolve_model(args.model_tag)
    token_ids = Tokenizer.load(folder).encode(text)
    most = min(CALIBRATION_TOKENS, load_spec(model_files.read_config(folder)).max_position)
    forced = TeacherForced.load(EngineConfig(model=args.model_tag), most)
    starts = range(0, len(token_ids), most)
    scales = calibrate(forced, (token_ids[at : at + most] for at in starts))
    write_scales(args.out, scales)
    print(f"wrote {args.out}")
    return 0


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
