"""The page at / in Chromium; `pytest -m browser`, with playwright and Debian's chromium there.

The last test paints the README's picture, docs/images/page.png, from the built-in model.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import ROOT, Server, eventually, running

pytestmark = pytest.mark.browser

PICTURE = ROOT / "docs" / "images" / "page.png"
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}
WIDE = {"viewport": {"width": 1280, "height": 1100}}
KEY = "sesame"
QUESTION = "What is a page, and who may hold it?"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server; afterwards nothing may have complained in the console."""
    contexts, complaints = [], []

    def note(message: Any) -> None:
        refused = "401" in message.text  # Chromium's own line: that is what the dialog is for
        if message.type in ("error", "warning") and not refused:
            complaints.append(message.text)

    def make(url: str, **options: Any) -> Any:
        context = browser.new_context(**{**WIDE, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{url}/")
        return page

    yield make
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def slow(model_folder: Path) -> Iterator[Server]:
    """An echo of 30 tokens a second."""
    with running(str(model_folder), core="--step-seconds 0.03") as server:
        yield server


def ask(page: Any, text: str, max_tokens: int = 60) -> None:
    page.get_by_text("Sampling").wait_for()
    page.evaluate("document.getElementById('sampling').open = true")
    page.get_by_label("max_tokens").fill(str(max_tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answer(page: Any) -> str:
    return page.locator(".turn.assistant .text").last.text_content()


def picture(page: Any) -> str:
    return page.evaluate("document.getElementById('pool').toDataURL()")


def overflow(page: Any) -> int:
    """Pixels by which the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def luminance(page: Any, css: str) -> float:
    """Of the body's colour, 0 to 1."""
    rgb = page.evaluate(f"getComputedStyle(document.body).{css}")
    return sum(map(int, re.findall(r"\d+", rgb)[:3])) / 3 / 255


def test_it_streams_and_the_grid_changes(open_page: Callable[..., Any], slow: Server):
    page = open_page(slow.url)
    page.locator("#state", has_text="ready").wait_for()
    eventually(lambda: "64 free" in page.locator("#pool").get_attribute("aria-label"))
    empty = picture(page)
    ask(page, QUESTION)
    lengths: list[int] = []

    def growing() -> bool:
        lengths.append(len(answer(page)))
        return len(set(lengths)) > 4

    eventually(growing)
    page.locator("#state", has_text="working").wait_for()
    page.locator("#owners", has_text="this chat").wait_for()
    assert picture(page) != empty
    assert page.locator("#table li").count() == 1
    assert page.locator("#running").text_content() == "1"
    page.locator(".turn.assistant .meta").wait_for()
    assert answer(page).startswith(QUESTION[:20])
    assert "first after" in page.locator(".turn.assistant .meta").text_content()
    page.locator("#owners", has_text="this chat").wait_for(state="detached")
    eventually(lambda: "64 free" in page.locator("#pool").get_attribute("aria-label"))
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0


@pytest.mark.parametrize("how", ["button", "key"])
def test_it_stops(open_page: Callable[..., Any], slow: Server, how: str):
    page = open_page(slow.url)
    ask(page, "Go on. " * 6, max_tokens=100)
    eventually(lambda: len(answer(page)) > 3)
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    page.locator(".turn.assistant .meta", has_text="stopped").wait_for()
    assert 0 < len(answer(page)) < 80
    eventually(lambda: slow.metric("num_requests_running") == 0)
    page.get_by_role("button", name="Send").wait_for()


def test_settings_reach_the_server(open_page: Callable[..., Any], slow: Server):
    page = open_page(slow.url)
    values = {"temperature": "0.5", "top_p": "0.9", "top_k": "7", "seed": "3"}
    for name, value in values.items():
        page.get_by_label(name).fill(value)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hush", max_tokens=2)
    body = sent.value.post_data_json
    assert {name: str(body[name]) for name in values} == values
    assert body["max_tokens"] == 2
    page.locator(".turn.assistant .meta", has_text="length").wait_for()


def test_the_servers_words_are_shown(open_page: Callable[..., Any], slow: Server):
    page = open_page(slow.url)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        status=200, content_type="text/event-stream",
        body='data: {"error": {"message": "the engine is gone"}}\n\ndata: [DONE]\n\n',
    ))  # fmt: skip
    ask(page, "Hush")
    page.locator(".turn.failed", has_text="the engine is gone").wait_for()


def test_what_a_model_says_is_no_html(open_page: Callable[..., Any], slow: Server):
    page = open_page(slow.url)
    text = "<img src=x onerror=alert(1)>"
    ask(page, text)
    page.locator(".turn.assistant .meta").wait_for()
    assert answer(page).startswith("<img")
    assert page.locator("#log img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(open_page: Callable[..., Any], slow: Server, scheme: str):
    page = open_page(slow.url, **PHONE, color_scheme=scheme)
    assert overflow(page) <= 0
    ask(page, "Unbreakable" * 8, max_tokens=60)
    page.locator("#owners", has_text="this chat").wait_for()
    assert overflow(page) <= 0
    page.locator(".turn.assistant .meta").wait_for()
    assert overflow(page) <= 0
    paper, ink = luminance(page, "backgroundColor"), luminance(page, "color")
    assert (paper < 0.15 and ink > 0.8) if scheme == "dark" else (paper > 0.9 and ink < 0.2)


def test_everything_has_a_name(open_page: Callable[..., Any], slow: Server):
    page = open_page(slow.url)
    nameless = page.evaluate("""() =>
        [...document.querySelectorAll("button, input, textarea, canvas, summary, a, section, ol")]
        .filter((item) => !(item.ariaLabel || item.textContent.trim() || item.labels?.length
            || item.getAttribute("aria-labelledby") || item.ariaHidden))
        .map((item) => item.id)""")
    assert nameless == []
    page.keyboard.press("Tab")
    seen = []
    for _ in range(14):
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    assert {"clear", "temperature", "max_tokens", "message", "send"} <= set(seen)


def test_it_asks_for_the_key(open_page: Callable[..., Any], model_folder: Path):
    with running(str(model_folder), "--api-key", KEY) as locked:
        page = open_page(locked.url)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.wait_for()
        dialog.get_by_role("button", name="Cancel").click()
        page.locator("#state", has_text="locked").wait_for()
        page.get_by_role("button", name="API key").click()
        page.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("The server refused that key.").wait_for()
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        page.locator("#state", has_text="ready").wait_for()
        ask(page, "Hush", max_tokens=4)
        page.locator(".turn.assistant .meta").wait_for()
        page.reload()  # the key is kept for the session
        page.locator("#state", has_text="ready").wait_for()
        assert page.evaluate("localStorage.length") == 0
        assert not dialog.is_visible()
        page.close()  # it would complain that the server is gone


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    """The built-in model on a small pool; its address."""
    command = [
        *(sys.executable, "-m", "jaxpaged", "serve", "--port", "0"),
        *("--num-gpu-blocks-override", "256", "--max-num-seqs", "16", "--enforce-eager"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        greeting = process.stdout.readline()
        yield re.search(r" at (http://\S+?):? ", greeting.replace(": ", " "))[1]
    finally:
        process.terminate()
        process.wait(20)


def load(url: str, number: int, max_tokens: int = 400) -> None:
    prompt = "It was the nightingale, and not the lark, that pierced the fearful hollow. " * (
        1 + number % 4
    )
    body = {"prompt": prompt, "max_tokens": max_tokens - 20 * number, "seed": number}
    httpx.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=120)


def test_the_picture_of_the_readme(open_page: Callable[..., Any], demo: str):
    with ThreadPoolExecutor(12) as others:
        list(others.map(load, [demo] * 12, range(12), [230] * 12))  # what compiles, compiles now
        page = open_page(demo, viewport={"width": 1280, "height": 1180})
        page.locator("#state", has_text="ready").wait_for()
        loads = [others.submit(load, demo, number) for number in range(12)]
        eventually(lambda: int(page.locator("#held").text_content()[:-2].split(".")[0]) > 40, 60)
        page.get_by_label("seed").fill("28")
        ask(page, "Tell me a long tale.", max_tokens=200)
        eventually(lambda: len(answer(page)) > 250, 60)
        page.locator("#owners", has_text="this chat").wait_for()
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(path=PICTURE)
        for done in loads:
            done.result()
    assert PICTURE.stat().st_size < 300_000
