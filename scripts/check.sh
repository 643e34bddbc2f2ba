#!/usr/bin/env bash
# Every check of the project, in the order of their cost; CI and the pre-push hook call it too.
# Usage: scripts/check.sh [arguments for pytest]
set -uo pipefail
cd "$(dirname "$0")/.."

failed=()
step() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

step "format" ruff format --check --quiet
step "lint" ruff check --quiet
step "imports" lint-imports --no-cache --no-logo
step "types" mypy
# Two workers, files whole: what a file's tests share is made once. Much of the time goes to waiting.
# In the order of their names: by default files of few tests come last, and those are the long ones.
step "tests" python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"

if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}" >&2
  exit 1
fi
echo "all checks passed"
