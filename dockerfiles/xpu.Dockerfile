# Intel GPUs (Arc Pro B60 and kin): our tools (`runner`), SGLang from its source (`sglang`), or over vLLM's image (`vllm`).
#
# moegate-context: wheelhouse/own
#
# The device needs the xe kernel driver on the host. torch's XPU wheels bring their own SYCL runtime: oneAPI's setvars.sh is
# never sourced here, because two runtimes in one process do not mix. Triton's package is called triton-xpu up to 3.7.1 and
# triton (with +xpu in its version) from 3.8.0; both are taken out before the wanted one goes in.
ARG TOOLS_BASE=docker.io/library/python:3.12-slim-bookworm
ARG BASE=docker.io/intel/deep-learning-essentials:2025.3.2-0-devel-ubuntu24.04
ARG VLLM_BASE=docker.io/vllm/vllm-openai-xpu:v0.32.0
ARG ENGINE_PYTHON=python3

# Needs no vendor base: says at once whether the context is a good one (one wheel, readable), on any base with Python.
# hadolint ignore=DL3006
FROM ${TOOLS_BASE} AS own
COPY . /opt/moegate-own/
RUN set -- /opt/moegate-own/moegate-*.whl && test "$#" = 1 && python3 -m zipfile --test "$1"

# hadolint ignore=DL3006
FROM ${BASE} AS device
ARG TORCH=2.14.0+xpu
ARG TRITON=3.8.0+xpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/xpu
ARG TRITON_INDEX=https://wheels.vllm.ai/xpu/
# hadolint ignore=DL3002
USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends software-properties-common \
    && add-apt-repository -y ppa:kobuk-team/intel-graphics \
    && apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates clinfo g++ gcc git intel-gsc intel-metrics-discovery \
        intel-ocloc intel-opencl-icd libc6-dev libze-dev libze-intel-gpu1 libze1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/device \
    && /opt/device/bin/python -m pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH}" numpy \
    && /opt/device/bin/python -m pip uninstall -y triton triton-xpu pytorch-triton-xpu \
    && /opt/device/bin/python -m pip install --no-cache-dir --no-deps --extra-index-url "${TRITON_INDEX}" "triton==${TRITON}"

FROM device AS runner
LABEL org.opencontainers.image.title="moegate (XPU)" \
      org.opencontainers.image.description="Kernel tuning and serving on Intel GPUs" \
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

# SGLang's XPU build comes from its source tree: its pyproject_xpu.toml replaces the CUDA one. The constraint keeps pip from
# replacing the XPU torch and Triton with builds for another vendor.
FROM device AS sglang
ARG SGLANG=0.5.23
ARG TORCH_INDEX=https://download.pytorch.org/whl/xpu
ARG SGLANG_REPOSITORY=https://github.com/sgl-project/sglang.git
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/sglang
RUN git clone --depth 1 --branch "v${SGLANG}" "${SGLANG_REPOSITORY}" . \
    && cp python/pyproject_xpu.toml python/pyproject.toml \
    && /opt/device/bin/python -m pip freeze | grep -iE '^(torch|triton)' > /opt/device/constraints.txt \
    && /opt/device/bin/python -m pip install --no-cache-dir --constraint /opt/device/constraints.txt \
        --extra-index-url "${TORCH_INDEX}" ./python
LABEL org.opencontainers.image.title="moegate (SGLang, XPU)" \
      org.opencontainers.image.description="SGLang with kernel tuning and load tests beside it" \
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
FROM ${VLLM_BASE} AS vllm
ARG ENGINE_PYTHON
USER 0
LABEL org.opencontainers.image.title="moegate (vLLM, XPU)" \
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
    VLLM_WORKER_MULTIPROC_METHOD=spawn
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT []
CMD ["/opt/moegate/bin/orchestrator", "--help"]
