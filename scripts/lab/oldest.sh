#!/usr/bin/env bash
# Runs the tests that are not slow with the oldest versions that setup.py allows; arguments go to pytest.
#
#     bash scripts/lab/oldest.sh [-n 2]                  # in .venv-oldest, or in the folder that $OLDEST names
#
# The environment is built of the lower bounds in setup.py: 2 GB, then some minutes of tests. The oldest Python is 3.10
# (of pyenv: PYENV_VERSION=3.10 before the command); where there is none, 3.11 will do.
set -euo pipefail
cd "$(dirname "$0")/../.."
place=${OLDEST:-.venv-oldest}
for python in python3.10 python3.11 python3; do
    "$python" --version > /dev/null 2>&1 && break
done
[ -x "$place/bin/python" ] || "$python" -m venv "$place"
sed -n '/install_requires/,/\]/s/^ *"\([^">]*\)>=\([^"]*\)".*/\1==\2/p' setup.py > "$place/oldest.txt"
"$place/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$place/oldest.txt" --editable '.[test]'
"$place/bin/python" -m pytest -m "not slow" "$@"
