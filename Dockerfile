# One image for every program: control plane, nodes, load, console. It carries the weights, so nothing is fetched when it
# runs. Wheels in deploy/wheelhouse make a build without a network: --build-arg PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheelhouse.
FROM python:3.11-slim

ARG PIP_NO_INDEX=
ARG PIP_FIND_LINKS=
# Where torch without CUDA is; empty: torch with CUDA, from the package index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS="native plan console tui"
ARG MODEL=smollm2-135m

ENV PATH=/opt/phaseplane/venv/bin:$PATH \
    PHASEPLANE_HOME=/opt/phaseplane \
    HOME=/tmp \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1
WORKDIR /opt/phaseplane

COPY pyproject.toml requirements.lock deploy/requirements.py src/
# Compiled on all cores; a package may hold a template that is no Python, so a file that fails is no error.
RUN --mount=type=bind,source=deploy/wheelhouse,target=/wheelhouse \
    python3 -m venv venv \
    && python3 src/requirements.py src/pyproject.toml $EXTRAS > src/requirements.txt \
    && PIP_EXTRA_INDEX_URL=$TORCH_INDEX pip install --no-compile \
    --constraint src/requirements.lock --requirement src/requirements.txt \
    && { python3 -m compileall -q -j 0 venv/lib || true; }

# Before the rest of the code, so that only a change of these files converts the weights again.
COPY transfer/*.py src/transfer/
COPY nodes/__init__.py src/nodes/
COPY nodes/models src/nodes/models
RUN --mount=type=bind,source=deploy/wheelhouse,target=/wheelhouse \
    cd src && python3 -m nodes.models.pull $MODEL && chmod -R a+rX ../models

COPY README.md LICENSE src/
COPY transfer src/transfer
COPY nodes src/nodes
COPY controlplane src/controlplane
COPY ui src/ui
RUN --mount=type=bind,source=deploy/wheelhouse,target=/wheelhouse \
    pip install --no-deps ./src && rm -r src

COPY --chmod=755 deploy/entrypoint.sh deploy/connector.sh deploy/addresses.py deploy/drain.py deploy/healthy.py deploy/make_keys.py ./
# A new volume takes its owner from the folder it is mounted on.
RUN install -d -o 10001 -g 10001 /keys/control /keys/nodes /keys/clients /var/lib/phaseplane /gpu /model
USER 10001:10001
ENTRYPOINT ["/opt/phaseplane/entrypoint.sh"]
CMD ["phaseplane"]
