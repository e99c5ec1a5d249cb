# NVIDIA GPUs: our tools (`runner`), or over an engine's released image (`sglang`, `vllm`).
#
# moegate-context: wheelhouse/own
#
# The engine of an image is never disturbed: see overlay.sh. Versions are pinned by tag; pin by digest for a fleet:
# --build-arg SGLANG_BASE=docker.io/lmsysorg/sglang@sha256:... CUDA 13 images need driver 580 or newer.
ARG TOOLS_BASE=docker.io/library/python:3.12-slim-bookworm
ARG BASE=docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04
ARG SGLANG_BASE=docker.io/lmsysorg/sglang:v0.5.23-cu130
ARG VLLM_BASE=docker.io/vllm/vllm-openai:v0.32.0
ARG ENGINE_PYTHON=python3

# Needs no vendor base: says at once whether the context is a good one (one wheel, readable), on any base with Python.
# hadolint ignore=DL3006
FROM ${TOOLS_BASE} AS own
COPY . /opt/moegate-own/
RUN set -- /opt/moegate-own/moegate-*.whl && test "$#" = 1 && python3 -m zipfile --test "$1"

# gcc and Python's headers: Triton compiles its launchers when a kernel first runs.
# hadolint ignore=DL3006
FROM ${BASE} AS device
ARG TORCH=2.11.0+cu130
ARG TRITON=3.6.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/device \
    && /opt/device/bin/python -m pip install --no-cache-dir --index-url "${TORCH_INDEX}" \
        "torch==${TORCH}" "triton==${TRITON}" numpy

FROM device AS runner
LABEL org.opencontainers.image.title="moegate (CUDA)" \
      org.opencontainers.image.description="Kernel tuning and serving on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY . /opt/moegate-own/
RUN sh /opt/moegate-own/overlay.sh /opt/device/bin/python /opt/moegate-own
RUN groupadd --gid 10001 moegate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin moegate \
    && install -d -m 1777 /cache
ENV HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT []
CMD ["/opt/moegate/bin/orchestrator", "--help"]

# hadolint ignore=DL3006
FROM ${SGLANG_BASE} AS sglang
ARG ENGINE_PYTHON
USER 0
LABEL org.opencontainers.image.title="moegate (SGLang, CUDA)" \
      org.opencontainers.image.description="SGLang with kernel tuning and load tests beside it" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY . /opt/moegate-own/
RUN sh /opt/moegate-own/overlay.sh "${ENGINE_PYTHON}" /opt/moegate-own
RUN groupadd --gid 10001 moegate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin moegate \
    && install -d -m 1777 /cache
ENV HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT []
CMD ["/opt/moegate/bin/orchestrator", "--help"]

# hadolint ignore=DL3006
FROM ${VLLM_BASE} AS vllm
ARG ENGINE_PYTHON
USER 0
LABEL org.opencontainers.image.title="moegate (vLLM, CUDA)" \
      org.opencontainers.image.description="vLLM with kernel tuning and load tests beside it" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY . /opt/moegate-own/
RUN sh /opt/moegate-own/overlay.sh "${ENGINE_PYTHON}" /opt/moegate-own
RUN groupadd --gid 10001 moegate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin moegate \
    && install -d -m 1777 /cache
ENV HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT []
CMD ["/opt/moegate/bin/orchestrator", "--help"]
