# The profiler: the commands of its Jobs, with a load generator and without a GPU library.
# Releases name BASE by digest. It has python3 (3.11 or 3.12) with venv, and the C library of Debian.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
COPY constraints.txt ./
COPY protocol protocol
COPY client client
COPY cli cli
COPY schedulers schedulers
COPY profiler profiler
RUN python3 -m venv /build \
 && python3 -m venv --without-pip /opt/aqua \
 && /build/bin/pip --python /opt/aqua/bin/python install --no-cache-dir --constraint constraints.txt \
      ./protocol ./client './cli[plot]' ./schedulers ./profiler

FROM ${BASE}
LABEL org.opencontainers.image.title="aqua-profiler" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/aqua /opt/aqua
ENV PATH=/opt/aqua/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    MPLCONFIGDIR=/tmp
USER 65532:65532
ENTRYPOINT ["aqua-profile"]
CMD ["--help"]
