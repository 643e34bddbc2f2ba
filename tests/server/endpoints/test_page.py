from __future__ import annotations

import re

import httpx
import pytest
from fake_server import Server, running

from jaxpaged.server.endpoints.page import FILES, WEB


def test_every_file_is_served_as_what_it_is(server: Server):
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
    for path, name in FILES.items():
        answer = server.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(types[name.rpartition(".")[2]])
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert httpx.head(server.url + path).status_code == 200
    assert {path.name for path in WEB.iterdir()} == set(FILES.values())


def test_nothing_comes_from_elsewhere():
    for name in FILES.values():
        text = (WEB / name).read_text()
        addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
        assert addresses == set(), name
        assert "innerHTML" not in text  # what a model says is never HTML
        # Relative: the server may stand behind a path.
        assert not re.search(r"(?:src|href)=\"/|call\(\"/|from \"/", text)


def test_every_element_that_the_scripts_name_exists():
    page = (WEB / "index.html").read_text()
    ids = re.findall(r'\bid="([\w-]+)"', page)
    assert len(ids) == len(set(ids))
    scripts = "".join((WEB / name).read_text() for name in FILES.values() if name.endswith("js"))
    assert set(re.findall(r'\$\("([\w-]+)"\)', scripts)) - set(ids) == set()


def test_the_page_is_no_part_of_the_interface(server: Server):
    paths = server.get("/openapi.json").json()["paths"]
    assert "/engine_state" in paths and not set(FILES) & set(paths)


@pytest.fixture(scope="module")
def locked():
    flags = ("--skip-tokenizer-init", "--api-key", "sesame", "--root-path", "/llm")
    with running(*flags) as server:
        server.url = server.url.removesuffix("/llm")
        yield server


def test_with_a_key_the_files_are_open_and_the_data_is_not(locked: Server):
    for path in FILES:
        assert locked.get(path).status_code == 200
        assert locked.get(f"/llm{path}").status_code == 200
    assert locked.get("/engine_state").status_code == 401
    key = {"Authorization": "Bearer sesame"}
    assert locked.get("/engine_state", headers=key).status_code == 200
    for path in ("/index.html", "/app.js/", "//", "/app.jsx"):
        assert locked.get(path).status_code == 401
