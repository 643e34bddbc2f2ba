from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxpaged
import jaxpaged.cli
import jaxpaged.server.service
from jaxpaged.config import EngineConfig
from jaxpaged.engine import follower
from jaxpaged.server_config import ServerConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """What `serve` would have been started with."""
    found: list[tuple[EngineConfig, ServerConfig]] = []

    def serve(engine: EngineConfig, server: ServerConfig) -> int:
        found.append((engine, server))
        return 0

    monkeypatch.setattr(jaxpaged.server.service, "serve", serve)
    monkeypatch.delenv("JAXPAGED_API_KEY", raising=False)
    return found


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a command which cannot run says."""
    try:
        code = jaxpaged.cli.main(argv)
    except SystemExit as error:
        code = error.code
    assert code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in lines if not line.startswith(("usage:", " "))]) == 1
    return lines[-1]


def test_defaults(served: list):
    assert jaxpaged.cli.main(["serve"]) == 0
    assert served == [(EngineConfig(), ServerConfig())]


@pytest.mark.parametrize("dashes", ["-", "--"])
def test_short_names_have_one_dash_or_two(dashes: str, served: list) -> None:
    words = [word for name in ("tp", "pp", "dp") for word in (f"{dashes}{name}", "2")]
    assert jaxpaged.cli.main(["serve", *words]) == 0
    ((config, _),) = served
    assert (config.num_devices, config.data_parallel_size) == (4, 2)


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_hosts_but_the_first_follow(
    command: str, served: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[EngineConfig] = []
    monkeypatch.setattr(follower, "follow", lambda config: followed.append(config) or 0)
    hosts = ["-tp", "4", "--num-hosts", "2", "--distributed-coordinator", "10.0.0.1:9100"]
    assert jaxpaged.cli.main([command, "--host-id", "1", *hosts]) == 0
    (config,) = followed
    assert (config.host_id, config.num_hosts, served) == (1, 2, [])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--num-hosts 2", "num_hosts and distributed_coordinator need each other"),
        ("--distributed-coordinator a:1", "num_hosts and distributed_coordinator need each other"),
        ("--num-hosts 2 --distributed-coordinator a", "like 10.0.0.1:9100"),
        ("--num-hosts 2 --distributed-coordinator a:99999", "a port up to 65535, got 'a:99999'"),
        ("--num-hosts 2 --distributed-coordinator [::1]:9100", "an IPv4 address or a name"),
        ("--num-hosts 2 --distributed-coordinator a:1 --distributed-timeout inf", "(0, 86400]"),
        ("--num-hosts 2 --distributed-coordinator a:1 --distributed-timeout nan", "(0, 86400]"),
        ("--num-hosts 2 --distributed-coordinator a:1 -tp 2 --host-id 2", "less than num_hosts"),
        ("--num-hosts 2 --distributed-coordinator a:1 -tp 3", "multiple of num_hosts, 2"),
        ("--num-hosts 2 --distributed-coordinator a:1 -tp 2 -dp 2", "data_parallel_size must be 1"),
        ("--num-hosts 2 --distributed-coordinator a:1 -tp 2 -pp 2", "pipeline_parallel_size must"),
    ],
)
def test_hosts_that_do_not_add_up(
    flags: str, reason: str, served: list, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in failure(capsys, "serve", *flags.split())


def test_flags_reach_the_settings(served: list):
    jaxpaged.cli.main(
        ["serve", "org/model", "--max-model-len", "8k", "--no-enable-prefix-caching"]
        + ["--gpu-memory-utilization", "0.5", "--max-num-seqs", "7", "--dtype", "bfloat16"]
        + ["--block-size", "32", "--served-model-name", "a", "b", "--port", "9", "--host", "::"]
        + ["--default-chat-template-kwargs", '{"x": 1}', "--enable-log-requests"]
    )
    engine, server = served[0]
    assert engine == EngineConfig(
        model="org/model", max_model_len=8000, enable_prefix_caching=False, max_num_seqs=7,
        gpu_memory_utilization=0.5, dtype="bfloat16", block_size=32,
    )  # fmt: skip
    assert server == ServerConfig(
        served_model_name=("a", "b"), port=9, host="::", enable_log_requests=True,
        default_chat_template_kwargs={"x": 1},
    )  # fmt: skip


@pytest.mark.parametrize("argv", [["M"], ["--model", "M"], ["M", "--model", "M"]])
def test_two_ways_to_name_the_model(served: list, argv: list[str]):
    jaxpaged.cli.main(["serve", *argv])
    assert served[0][0].model == "M"


def test_a_key_from_the_environment(served: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXPAGED_API_KEY", "hidden")
    jaxpaged.cli.main(["serve"])
    jaxpaged.cli.main(["serve", "--api-key", "named"])
    assert [server.api_key for _, server in served] == [("hidden",), ("named",)]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--block-size", "17"], ["--block-size", "17"]),
        (["--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (["--max-model-len", "long"], ["tokens", "'long'"]),
        (["--gpu-memory-utilization", "1.5"], ["gpu_memory_utilization", "1.5"]),
        (["--port", "70000"], ["port", "70000"]),
        (["--port", "x"], ["--port", "x"]),
        (["--ssl-keyfile", "k"], ["ssl_certfile"]),
        (["--metrics-prefix", "a:b"], ["metrics_prefix", "a:b"]),
        (["--root-path", "/llm/"], ["root_path", "/llm"]),
        (["--default-chat-template-kwargs", "[]"], ["JSON object"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["A", "--model", "B"], ["'A'", "'B'"]),
        (["--config", "/no/file.yaml"], ["/no/file.yaml"]),
    ],
)
def test_what_does_not_fit_is_told_in_a_line(
    served: list, capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
):
    line = failure(capsys, "serve", *argv)
    assert all(word in line for word in words), line
    assert served == []


def test_a_config_file_and_the_command_line_wins(served: list, tmp_path: Path):
    file = tmp_path / "settings.yaml"
    file.write_text(
        "model: org/from-file\nmax-num-seqs: 5\nmax_model_len: 8K\nenable_prefix_caching: false\n"
        "enforce-eager: true\nport: 9\ndefault-chat-template-kwargs: {x: [1, 'a b']}\n"
        "revision:\nserved-model-name: [a, b]\n"
    )
    jaxpaged.cli.main(["serve", "--config", str(file), "--port", "10", "--no-enforce-eager"])
    jaxpaged.cli.main(["serve", "org/named", "--config", str(file)])
    jaxpaged.cli.main(["serve", f"--config={file}", "org/named", "--served-model-name", "c"])
    (engine, server), (named, _), (last, renamed) = served
    assert engine == EngineConfig(
        model="org/from-file", max_num_seqs=5, max_model_len=8192, enable_prefix_caching=False
    )
    assert (server.port, server.served_model_name) == (10, ("a", "b"))
    assert server.default_chat_template_kwargs == {"x": [1, "a b"]}
    assert (named.model, named.enforce_eager) == ("org/named", True)
    assert (last.model, renamed.served_model_name) == ("org/named", ("c",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-num-sequences: 5\nportt: 1\n", ["--max-num-sequences", "--portt"]),
        ("- a\n", ["table"]),
        ("a: [", ["cannot read"]),
        ("enforce-eager: maybe\n", ["--enforce-eager", "true or false"]),
        ("port: high\n", ["--port", "high"]),
        ("config: other.yaml\n", ["--config"]),
        ("default-chat-template-kwargs: {day: 2026-11-29}\n", ["--default-chat", "date"]),
        ("api-key: [null]\n", ["--api-key", "quote"]),
        ("api-key: 0123\n", ["--api-key", "quote"]),
        ("uds: 0123\n", ["--uds", "quote"]),
        ("max_model_len: yes\n", ["tokens"]),
        ("model: \udcff\n", ["cannot read", "settings.yaml"]),  # a byte that is no UTF-8
    ],
)
def test_bad_config_files(
    served: list,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: str,
    words: list[str],
):
    file = tmp_path / "settings.yaml"
    file.write_text(content, "utf-8", "surrogateescape")
    line = failure(capsys, "serve", "--config", str(file))
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "content", ['api-key: "hidden\nport: 1', "api-key: hidden: x", "api-key: *hidden",
                "api-key: !hidden x", "api-key: [1, hidden\n}", "api-key: hidden\x07"],
)  # fmt: skip
def test_a_config_file_that_is_no_yaml_is_not_quoted(
    served: list, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    line = failure(capsys, "serve", "--config", str(file))
    assert "cannot read" in line and "hidden" not in line


def test_a_password_of_an_address_is_not_quoted(capsys: pytest.CaptureFixture[str]):
    line = failure(capsys, "serve", "--otlp-traces-endpoint", "ftp://user:hidden@host")
    assert "otlp_traces_endpoint" in line and "hidden" not in line


def help_of(*command: str) -> str:
    argv = [sys.executable, "-m", "jaxpaged", *command, "--help"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_help_is_complete():
    text = help_of("serve")
    assert text.index("engine: model") < text.index("server: HTTP")
    for settings in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(settings):
            flag = "--" + field.name.replace("_", "-")
            assert flag in text
            words = field.metadata["help"].split()[:3]
            assert all(word.rstrip(",:;") in text for word in words)
    assert "default: 8000" in text
    for command in ("serve", "generate", "chat", "convert", "plan"):
        assert command in help_of()
        assert "MODEL" in help_of(command)


def test_no_command_and_version(capsys: pytest.CaptureFixture[str]):
    failure(capsys)
    failure(capsys, "fly")
    with pytest.raises(SystemExit) as done:
        jaxpaged.cli.main(["--version"])
    assert done.value.code == 0
    assert jaxpaged.__version__ in capsys.readouterr().out


def test_convert_and_failures_of_files(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    line = failure(capsys, "convert", str(tmp_path), str(tmp_path / "out"))
    assert "NoSuchModel" in line
    line = failure(capsys, "generate", str(tmp_path), "--prompt", "x")
    assert str(tmp_path) in line


@pytest.mark.parametrize("name", jaxpaged.__all__)
def test_the_packages_names_load_on_first_use(name: str):
    assert getattr(jaxpaged, name) is not None
    assert name in dir(jaxpaged)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="nothing"):
        jaxpaged.nothing  # noqa: B018


def test_no_message_shows_a_key():
    with pytest.raises(ValueError, match="api_key must be non-empty") as refused:
        ServerConfig(api_key=("very-secret", ""))
    assert "very-secret" not in str(refused.value)


def test_settings_of_the_server():
    for bad in ({"port": -1}, {"api_key": ("",)}, {"shutdown_timeout": -1.0}, {"x": 1}):
        settings: dict[str, Any] = bad
        with pytest.raises((ValueError, TypeError)):
            ServerConfig(**settings)
