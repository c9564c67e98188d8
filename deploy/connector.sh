#!/bin/sh
# Prepares what a vLLM beside an agent needs of us: `connector.sh PACKAGES LINK ...` copies what it loads of ours to
# PACKAGES, without the rest of our environment, and makes each LINK, the folder of a socket, for our user alone.
set -eu
site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$1"
cp -R "$site/transfer" "$site/nodes" "$1"
shift
mkdir -p -m 700 "$@"
