"""What an operator may do: POST /reset_prefix_cache, /start_profile, /stop_profile; /server_info.

Part of the application only with --enable-admin.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import platformdirs
from fastapi import APIRouter

import jaxpaged
from jaxpaged.server.context import Context

SECRETS = ("api_key", "ssl_keyfile", "otlp_traces_endpoint")  # a URL may hold a password

router = APIRouter(tags=["admin"])


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(context: Context) -> dict[str, bool]:
    """Forget every cached prefix; running requests keep their pages."""
    await context.engine.command("reset_prefix_cache")
    return {"success": True}


@router.post("/start_profile")
async def start_profile(context: Context) -> dict[str, str]:
    """Begin a trace of the engine's process for XProf or Perfetto, in --profile-dir; of several
    engines, each in a folder of its own there.
    """
    given = context.config.profile_dir
    folder = Path(given) if given else Path(platformdirs.user_cache_dir("jaxpaged")) / "profiles"
    numbers = range(len(context.engine.replicas))
    folders = [str(folder / f"engine-{number}") for number in numbers]
    await context.engine.command("start_profile", folders if len(folders) > 1 else [str(folder)])
    return {"folder": str(folder)}


@router.post("/stop_profile")
async def stop_profile(context: Context) -> dict[str, bool]:
    """End the trace and write it, which holds up the engine meanwhile."""
    await context.engine.command("stop_profile")
    return {"success": True}


@router.get("/server_info")
async def server_info(context: Context) -> dict[str, Any]:
    """Settings (without secrets), what the engine settled on, and how it stands."""
    server = dataclasses.asdict(context.config)
    for name in SECRETS:
        server[name] = bool(server[name])  # whether there is one
    return {
        "version": jaxpaged.__version__,
        "models": context.names,
        "server_config": server,
        "engine_config": dataclasses.asdict(context.engine.config),
        "engine_info": msgspec.to_builtins(context.engine.info),
        "engine_stats": msgspec.to_builtins(context.engine.stats),
        "engines": [
            {
                "dead": replica.dead and replica.dead.message,
                "stats": msgspec.to_builtins(replica.stats),
            }
            for replica in context.engine.replicas
        ],
    }
