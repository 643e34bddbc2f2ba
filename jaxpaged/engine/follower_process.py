"""A follower host's only process that owns JAX.

`python -m jaxpaged.engine.follower_process PARENT` reads its settings from standard input. It ends
with 0 when host 0 ends in peace, with 1 after a line that says why otherwise: also when process
PARENT, which started it, is gone. That one may be so before this one has come to ask for its id.
`engine/follower.py` starts it.
"""

from __future__ import annotations

import logging
import signal
import sys
import time

import msgspec

from jaxpaged.config import EngineConfig
from jaxpaged.engine.core_process import LOSS_SECONDS
from jaxpaged.error_log import log_to_stderr
from jaxpaged.parallel.hosts import end_process
from jaxpaged.runtime.memory import claim_memory
from jaxpaged.runtime.multi_host import follow

log = logging.getLogger(__name__)


def main() -> int:
    """Follow host 0; the exit status."""
    log_to_stderr("info")
    logging.getLogger("jax._src").setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    claim_memory(config)
    try:
        follow(config, end_process, parent=int(sys.argv[1]))
    except (ValueError, OSError) as error:
        end_process(str(error))
    except Exception as error:
        time.sleep(LOSS_SECONDS)  # a host that is gone makes computing fail, and is told of instead
        log.exception("host %d failed", config.host_id)
        end_process(f"host {config.host_id} failed: {type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
