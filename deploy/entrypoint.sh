#!/bin/sh
# Gives a program the keys of its place, then becomes it. KEYS: a file of variables that make_keys.py wrote.
# ROLE makes a node, called INSTANCE or else NODE-CONTAINER. Peers reach it at PHASEPLANE_DATA_ADVERTISE or else the
# container's address; where INTERFACES names network cards, it takes KV on their addresses instead.
# READY: what healthy.py asks, where %s stands for the name. STALE: files of a killed program, removed first.
set -eu
if [ -n "${KEYS:-}" ]; then
    set -a
    . "$KEYS"
    set +a
fi
name="${INSTANCE:-${NODE:-}-$(hostname | cut -c 1-6)}"
if [ -n "${ROLE:-}" ]; then
    if [ -n "${INTERFACES:-}" ]; then
        PHASEPLANE_DATA_HOST="$(python3 -IS "$(dirname "$0")/addresses.py" "$INTERFACES")"
        unset PHASEPLANE_DATA_ADVERTISE
    else
        PHASEPLANE_DATA_HOST=0.0.0.0
        export PHASEPLANE_DATA_ADVERTISE="${PHASEPLANE_DATA_ADVERTISE:-$(hostname -i)}"
    fi
    export PHASEPLANE_INSTANCES="$name=$ROLE" PHASEPLANE_DATA_HOST
fi
if [ -n "${READY:-}" ]; then
    # shellcheck disable=SC2059 # the format is ours
    printf "$READY" "$name" >/tmp/ready
fi
# shellcheck disable=SC2086 # a pattern
rm -f ${STALE:-}
exec "$@"
