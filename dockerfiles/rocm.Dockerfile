# AMD Instinct: our tools (`runner`), or over an engine's released image (`sglang`, `vllm`).
#
# moegate-context: wheelhouse/own
#
# runner takes ROCm 10 and torch from AMD's wheel index, for gfx942 (MI300X, MI325X) unless GFX says otherwise. The SGLang base
# is ROCm 7.2.4 with torch 2.11 and Triton 3.7, pinned by digest: its date stamp looks immutable and is not.
ARG TOOLS_BASE=docker.io/library/python:3.12-slim-bookworm
ARG BASE=docker.io/library/ubuntu:24.04
ARG SGLANG_BASE=docker.io/lmsysorg/sglang-rocm:v0.5.19-rocm724-mi30x-20260909@sha256:16e1ae7e199418fe4df58f6dffb7b2d6b8382cc998aae0d525f8d8b2f7959c98
ARG VLLM_BASE=docker.io/vllm/vllm-openai-rocm:v0.29.0
ARG ENGINE_PYTHON=python3

# Needs no vendor base: says at once whether the context is a good one (one wheel, readable), on any base with Python.
# hadolint ignore=DL3006
FROM ${TOOLS_BASE} AS own
COPY . /opt/moegate-own/
RUN set -- /opt/moegate-own/moegate-*.whl && test "$#" = 1 && python3 -m zipfile --test "$1"

# hadolint ignore=DL3006
FROM ${BASE} AS device
ARG ROCM=10.0.0
ARG GFX=gfx942
ARG TORCH=2.11.0+rocm10.0.0
ARG TRITON=3.8.0+git4cff872c.rocm10.0.0
ARG TORCH_INDEX=https://stable.repo.amd.com/rocm/whl-next/
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/device \
    && /opt/device/bin/python -m pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" \
        "rocm-sdk-core==${ROCM}" "rocm-sdk-libraries==${ROCM}" "rocm-sdk-devel==${ROCM}" "rocm-sdk-device-${GFX}==${ROCM}" \
        "torch==${TORCH}" "triton==${TRITON}" numpy

FROM device AS runner
LABEL org.opencontainers.image.title="moegate (ROCm)" \
      org.opencontainers.image.description="Kernel tuning and serving on AMD GPUs" \
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
LABEL org.opencontainers.image.title="moegate (SGLang, ROCm)" \
      org.opencontainers.image.description="SGLang with kernel tuning and load tests beside it" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY . /opt/moegate-own/
RUN sh /opt/moegate-own/overlay.sh "${ENGINE_PYTHON}" /opt/moegate-own
RUN groupadd --gid 10001 moegate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin moegate \
    && install -d -m 1777 /cache
ENV HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    HSA_ENABLE_IPC_MODE_LEGACY=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT []
CMD ["/opt/moegate/bin/orchestrator", "--help"]

# hadolint ignore=DL3006
FROM ${VLLM_BASE} AS vllm
ARG ENGINE_PYTHON
USER 0
LABEL org.opencontainers.image.title="moegate (vLLM, ROCm)" \
      org.opencontainers.image.description="vLLM with kernel tuning and load tests beside it" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY . /opt/moegate-own/
RUN sh /opt/moegate-own/overlay.sh "${ENGINE_PYTHON}" /opt/moegate-own
RUN groupadd --gid 10001 moegate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin moegate \
    && install -d -m 1777 /cache
ENV HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    HSA_NO_SCRATCH_RECLAIM=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT []
CMD ["/opt/moegate/bin/orchestrator", "--help"]
