#!/bin/sh
# Installs cssl for the Python at hand. Dockerfile and cssl.def run it, so that both contain the same.
#
#     sh scripts/containers/install.sh WHEELS [EXTRA]
#
# WHEELS is a folder with cssl's wheel. If that is the only one, its dependencies come from the package index; if there
# are others, they come from the folder, and no network is needed.
set -eu
wheels=$1 extra=${2:-} index=
set -- "$wheels"/cssl-*.whl
if [ $# -ne 1 ] || [ ! -f "$1" ]; then
    echo "error: expected one wheel of cssl in $wheels; 'pip wheel' puts it there, as docs/install.md says" >&2
    exit 2
fi
cssl=$1
set -- "$wheels"/*.whl
[ $# -eq 1 ] || index=--no-index
python -m pip install --no-cache-dir $index --find-links="$wheels" "$cssl${extra:+[$extra]}"
