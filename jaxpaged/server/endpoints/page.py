"""GET /: a page with a chat and a live view of the engine; static files, open to all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse

router = APIRouter(include_in_schema=False)

WEB = Path(__file__).parent.parent / "web"
FILES = {
    "/": "index.html",
    "/app.js": "app.js",
    "/chat.js": "chat.js",
    "/engine.js": "engine.js",
    "/pool.js": "pool.js",
    "/style.css": "style.css",
}
HEADERS = {
    "Cache-Control": "no-cache",  # ask whether it changed
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _serve(name: str) -> Callable[[], Awaitable[FileResponse]]:
    async def file() -> FileResponse:
        return FileResponse(WEB / name, headers=HEADERS)

    return file


for _path, _name in FILES.items():
    router.add_api_route(_path, _serve(_name), methods=["GET", "HEAD"])
