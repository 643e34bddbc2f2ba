from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fake_server import Server, running
from http_checks import check_error, strict_json

ROUTES = [
    ("POST", "/reset_prefix_cache"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("GET", "/server_info"),
]
KEY = {"Authorization": "Bearer secret-key"}


@pytest.fixture(scope="module")
def admin() -> Iterator[Server]:
    flags = ["--skip-tokenizer-init", "--enable-admin", "--api-key", "secret-key"]
    with running(*flags, "--profile-dir", "/somewhere") as server:
        yield server


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_not_there_unless_asked_for(server: Server, method: str, path: str):
    check_error(httpx.request(method, server.url + path), 404)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_key_guards_them(admin: Server, method: str, path: str):
    check_error(httpx.request(method, admin.url + path), 401)


def test_commands(admin: Server):
    def post(path: str) -> httpx.Response:
        return httpx.post(admin.url + path, headers=KEY)

    assert post("/reset_prefix_cache").json() == {"success": True}
    assert post("/start_profile").json() == {"folder": "/somewhere"}
    check_error(post("/start_profile"), 400, "already")
    assert post("/stop_profile").json() == {"success": True}


def test_server_info_tells_no_secret(admin: Server):
    answer = admin.get("/server_info", headers=KEY)
    info = strict_json(answer.text)
    assert "secret-key" not in answer.text
    assert (info["server_config"]["api_key"], info["server_config"]["ssl_keyfile"]) == (True, False)
    assert info["server_config"]["enable_admin"] is True
    assert info["engine_config"]["max_logprobs"] == 20
    assert info["engine_info"]["page_size"] == 16
    assert info["engine_stats"]["num_running"] == 0
