"""Let schemathesis look for what /openapi.json does not say: 500s, other codes, other bodies.

    pip install schemathesis
    python scripts/fuzz_api.py --max-examples 50                       # the built-in model
    python scripts/fuzz_api.py --base-url http://127.0.0.1:8000        # a running server

Arguments it does not know are schemathesis' own. Exit status 1 if there is any finding.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.serving import running_server

CHECKS = (
    *("not_a_server_error", "status_code_conformance"),
    *("content_type_conformance", "response_schema_conformance"),
)


def main() -> int:
    """Look; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", help="of a running server (default: starts one)")
    parser.add_argument("--max-examples", type=int, default=20, help="of each route")
    parser.add_argument("--phases", default="coverage,fuzzing", help="of schemathesis")
    args, more = parser.parse_known_args()
    with contextlib.ExitStack() as stack:
        url = args.base_url or stack.enter_context(running_server(["--enable-admin"]))
        command = [str(Path(sys.executable).with_name("schemathesis")), "run"]
        command += [f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--phases", args.phases]
        command += ["--max-examples", str(args.max_examples), "--request-timeout", "60", *more]
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
