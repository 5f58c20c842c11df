#!/usr/bin/env bash
# Sets up the environment if needed and runs the linter, the type checker and the whole test suite; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
ruff check .
mypy
python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal "$@"
