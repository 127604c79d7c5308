# The coordinator; the bundled Valkey of the chart is this image with another command.
#   buildah bud --platform linux/amd64,linux/arm64 --file docker/coordinator.Dockerfile .
# Releases name BASE by digest. It has python3 (3.11 or 3.12) with venv, and the C library of Debian.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
COPY constraints.txt ./
COPY protocol protocol
COPY client client
COPY cli cli
COPY coordinator coordinator
# An environment without pip, filled by the pip of another one that stays behind.
RUN python3 -m venv /build \
 && python3 -m venv --without-pip /opt/aqua \
 && /build/bin/pip --python /opt/aqua/bin/python install --no-cache-dir --constraint constraints.txt \
      ./protocol './client[otel]' ./cli './coordinator[otel]' \
 && ln -s "$(find /opt/aqua -name valkey-server -type f)" /opt/aqua/bin/valkey-server

FROM ${BASE}
LABEL org.opencontainers.image.title="aqua-coordinator" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/aqua /opt/aqua
ENV PATH=/opt/aqua/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    AQUA_DATA_DIR=/var/lib/aqua
# Any user may run it, also one that OpenShift draws; state is a volume, and so are tokens. One that
# docker makes there has the owner that it finds.
RUN install --directory --mode=0700 --owner=65532 --group=65532 /var/lib/aqua /etc/aqua/tokens
USER 65532:65532
EXPOSE 7700
ENTRYPOINT ["aqua-coordinator"]
CMD ["serve"]
