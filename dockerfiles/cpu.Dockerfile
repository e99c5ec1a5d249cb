# The CPU image: `tuner`, `serving` and `orchestrator` on torch's CPU build and Triton's interpreter.
#
# moegate-context: wheelhouse
# moegate-network: none
#
# `make wheelhouse` makes the context. Nothing is downloaded here: no package index, no certificate of one and no pip
# configuration reaches the image. Written for the classic builder as well as BuildKit: no RUN --mount, no heredoc.
# The base needs Python 3.11 with its venv module: `make base-image` makes one where no registry can be reached; elsewhere
# --build-arg BASE=docker.io/library/python:3.11-slim-bookworm does.
ARG BASE=moegate-base:bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS packages
WORKDIR /wheelhouse
COPY third-party/ ./third-party/
RUN python3 -m venv /opt/moegate \
    && /opt/moegate/bin/python -m pip install --no-cache-dir --no-index --no-deps ./third-party/*.whl

# hadolint ignore=DL3006
FROM ${BASE} AS runner
# Revision, version and time of the build are labels that the builder adds: as arguments they would defeat the cache.
LABEL org.opencontainers.image.title="moegate (CPU)" \
      org.opencontainers.image.description="Kernel tuning, serving and checks on a CPU" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 moegate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin moegate \
    && install -d -m 1777 /cache
COPY --from=packages /opt/moegate /opt/moegate
# Our own wheel last: a change of ours costs one thin layer.
COPY own/ /opt/moegate/own/
RUN /opt/moegate/bin/python -m pip install --no-cache-dir --no-index --no-deps /opt/moegate/own/*.whl \
    && /opt/moegate/bin/python -m pip check
ENV PATH=/opt/moegate/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /tmp
CMD ["orchestrator", "--help"]
