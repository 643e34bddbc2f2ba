"""What lies in deploy/ and docs/deploy.md: it parses, and every name in it exists."""

from __future__ import annotations

import configparser
import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from jaxpaged import cli
from jaxpaged.engine.messages import EngineInfo
from jaxpaged.engine.metrics import Metrics, MetricsRegistry
from jaxpaged.server.run import ABORT_SECONDS

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
BOARD = DEPLOY / "grafana" / "jaxpaged.json"
SUFFIXES = ("_bucket", "_sum", "_count")


@cache
def known_flags() -> frozenset[str]:
    return frozenset(cli._parsers()[1]["serve"]._option_string_actions)


@cache
def known_metrics() -> frozenset[str]:
    info = EngineInfo(
        max_model_len=64, vocab_size=8, num_pages=8, page_size=16, max_logprobs=5, platform="cpu",
        attention_backend="xla", dtype="float32", lm_head_dtype="float32",
        buckets=[], startup_seconds={},
    )  # fmt: skip
    registry = MetricsRegistry("m", "jaxpaged")
    Metrics(registry, info)
    text = registry.text().decode()
    return frozenset(re.findall(r"^jaxpaged:(\w+)", text, re.M))


def yaml_file(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def compose() -> dict:
    return yaml_file("compose.yaml")[0]


def manifest(kind: str) -> dict:
    (found,) = [item for item in yaml_file("kubernetes.yaml") if item["kind"] == kind]
    return found


def pod() -> dict:
    return manifest("Deployment")["spec"]["template"]["spec"]


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(DEPLOY / "jaxpaged.service")
    return parser


def commands() -> dict[str, list[str]]:
    """The arguments of `jaxpaged serve`, by the file that gives them."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile, re.M)
    return {
        "Dockerfile": json.loads(entry[1]),
        "compose.yaml": compose()["services"]["jaxpaged"]["command"],
        "kubernetes.yaml": pod()["containers"][0]["args"],
        "jaxpaged.service": unit()["Service"]["ExecStart"].split()[2:],
    }


def drain_seconds(name: str) -> float:
    (flag,) = [arg for arg in commands()[name] if arg.startswith("--shutdown-timeout=")]
    return float(flag.partition("=")[2])


@pytest.mark.parametrize(
    "name", ["Dockerfile", "compose.yaml", "kubernetes.yaml", "jaxpaged.service"]
)
def test_flags_exist(name: str):
    given = {arg.partition("=")[0] for arg in commands()[name] if arg.startswith("--")}
    assert given and given - known_flags() == set()


def test_flags_of_the_document_exist():
    text = (ROOT / "docs" / "deploy.md").read_text()
    named = set(re.findall(r"`(--[a-z][a-z-]+)", text))
    assert len(named) > 15 and named - known_flags() == set()


def test_metrics_of_the_document_exist():
    text = (ROOT / "docs" / "deploy.md").read_text()
    table = text[text.index("| symptom") :]
    symptoms = "\n".join(line.split("|")[1] for line in table.splitlines() if line[:1] == "|")
    named = set(re.findall(r"`([a-z_]+)[`{]", symptoms))
    exist = known_metrics() | {name.removesuffix("_count") for name in known_metrics()}
    assert len(named) > 8 and named - exist == set()


def test_the_board_shows_every_metric_and_no_other():
    board = json.loads(BOARD.read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    shown = set(re.findall(r"\$\{prefix\}:(\w+)", json.dumps(targets)))
    assert shown - known_metrics() == set()

    def family(names: set[str] | frozenset[str]) -> set[str]:
        return {re.sub(rf"({'|'.join(SUFFIXES)})$", "", name) for name in names}

    assert family(known_metrics()) - family(shown) == set()


def test_the_board_is_whole():
    board = json.loads(BOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    variables = {item["name"] for item in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\b", BOARD.read_text()))
    assert used == variables


def test_compose():
    services = compose()["services"]
    assert set(services) == {"jaxpaged", "prometheus", "grafana"}
    for service in services.values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing is open to others unless one says so"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if "/" in source else source in compose()["volumes"]
    grace = float(services["jaxpaged"]["stop_grace_period"].removesuffix("s"))
    assert grace > drain_seconds("compose.yaml") + ABORT_SECONDS
    assert (DEPLOY / services["jaxpaged"]["build"]["context"]).resolve() == ROOT


def test_each_service_has_a_secret_of_its_own():
    services = compose()["services"]
    password = services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    key = services["jaxpaged"]["environment"]["JAXPAGED_API_KEY"]
    named = [re.match(r"\$\{(\w+):\?", text)[1] for text in (password, key)]
    assert named == ["GRAFANA_PASSWORD", "JAXPAGED_API_KEY"]
    head = (DEPLOY / "compose.yaml").read_text().partition("\nname:")[0]
    assert all(name in head for name in named)


def test_prometheus_finds_the_server():
    (job,) = yaml_file("prometheus.yml")[0]["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["jaxpaged:8000"]}]
    (secret,) = compose()["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"


def test_kubernetes_probes_and_grace():
    (container,) = pod()["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = drain_seconds("kubernetes.yaml")
    assert pod()["terminationGracePeriodSeconds"] > pause + drain + ABORT_SECONDS
    claim = manifest("PersistentVolumeClaim")["metadata"]["name"]
    assert {"claimName": claim} in [v.get("persistentVolumeClaim") for v in pod()["volumes"]]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod()["volumes"]}
    assert manifest("Service")["spec"]["selector"].items() <= (
        manifest("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    )
    assert pod()["securityContext"]["runAsNonRoot"] is True


def test_the_image_drops_root_and_keeps_its_caches():
    text = (DEPLOY / "Dockerfile").read_text()
    users = re.findall(r"^USER (\S+)", text, re.M)
    assert users == [str(pod()["securityContext"]["runAsUser"])]
    assert "VOLUME /cache" in text and "XDG_CACHE_HOME=/cache" in text
    assert "HEALTHCHECK" in text and "/health" in text
    copied = re.findall(r"^!(\S+)", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_unit_is_hardened_and_waits():
    service = unit()["Service"]
    assert float(service["TimeoutStopSec"]) > drain_seconds("jaxpaged.service") + ABORT_SECONDS
    for setting in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome"):
        assert service[setting] == "yes"
    assert service["Restart"] == "on-failure"
