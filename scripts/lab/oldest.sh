#!/usr/bin/env bash
# Runs the tests that are not slow with the oldest versions that setup.py allows; arguments go to pytest.
#
#     bash scripts/lab/oldest.sh [-n 2]                  # in .venv-oldest, or in the folder that $OLDEST names
#
# The environment is built of the lower bounds in setup.py: 2 GB, then some minutes of tests. The oldest Python is 3.11
# (of pyenv: PYENV_VERSION=3.11 before the command).
set -euo pipefail
cd "$(dirname "$0")/../.."
place=${OLDEST:-.venv-oldest}
[ -x "$place/bin/python" ] || python3.11 -m venv "$place"
sed -n '/install_requires/,/\]/s/^ *"\([^">]*\)>=\([^"]*\)".*/\1==\2/p' setup.py > "$place/oldest.txt"
"$place/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$place/oldest.txt" --editable '.[test]'
"$place/bin/python" -m pytest -m "not slow" "$@"
