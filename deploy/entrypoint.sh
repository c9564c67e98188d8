#!/bin/sh
# Gives a program the keys of its place, then becomes it. KEYS: a file of variables that make_keys.py wrote.
# NODE and ROLE make a node, called NODE-CONTAINER, that its peers reach at the container's address.
# READY: what healthy.py asks, where %s stands for that name.
set -eu
if [ -n "${KEYS:-}" ]; then
    set -a
    . "$KEYS"
    set +a
fi
name="${NODE:-}-$(hostname | cut -c 1-6)"
if [ -n "${ROLE:-}" ]; then
    export PHASEPLANE_INSTANCES="$name=$ROLE" PHASEPLANE_DATA_HOST=0.0.0.0
    PHASEPLANE_DATA_ADVERTISE="$(hostname -i)"
    export PHASEPLANE_DATA_ADVERTISE
fi
if [ -n "${READY:-}" ]; then
    # shellcheck disable=SC2059 # the format is ours
    printf "$READY" "$name" >/tmp/ready
fi
exec "$@"
