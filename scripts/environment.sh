# Sourced by quickstart.sh and test.sh, from the repository's root: makes sure that `python` has the
# project's dependencies. Uses the active virtual or conda environment; without one it creates .venv.
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    [ -x .venv/bin/python ] || python3 -m venv .venv
    . .venv/bin/activate
fi
python -m pip install --quiet --disable-pip-version-check --editable '.[test,docs]'
