"""What an operator may ask of a running core, beside requests."""

from __future__ import annotations

from pathlib import Path

import jax

from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.messages import Command, CommandDone


def run_command(command: Command, scheduler: Scheduler) -> CommandDone:
    """Do it now, between two steps."""
    done = CommandDone(command.number)
    try:
        match command.name:
            case "reset_prefix_cache":
                if not scheduler.reset_prefix_cache():
                    done.error = "prefix caching is off (--no-enable-prefix-caching)"
            case "start_profile":
                Path(command.argument).mkdir(parents=True, exist_ok=True)
                jax.profiler.start_trace(command.argument)
                done.result = command.argument
            case "stop_profile":
                jax.profiler.stop_trace()
            case other:
                done.error = f"there is no command {other!r}"
    except (RuntimeError, OSError) as error:  # a profile runs already, none runs, no room
        done.error = str(error).splitlines()[0]
    return done
