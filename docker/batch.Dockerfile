# The batch service: `serve`, the default, and the commands of its init container and its tenants.
# Releases name BASE by digest. It has python3 (3.11 or 3.12) with venv, and the C library of Debian.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
COPY constraints.txt ./
COPY protocol protocol
COPY cli cli
COPY schedulers schedulers
COPY batch batch
RUN python3 -m venv /build \
 && python3 -m venv --without-pip /opt/aqua \
 && /build/bin/pip --python /opt/aqua/bin/python install --no-cache-dir --constraint constraints.txt \
      ./protocol './cli[plot]' ./schedulers './batch[serve,postgres,s3]'

FROM ${BASE}
LABEL org.opencontainers.image.title="aqua-batch" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/aqua /opt/aqua
ENV PATH=/opt/aqua/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    MPLCONFIGDIR=/tmp \
    AQUA_BATCH_DATA_DIR=/var/lib/aqua
# Any user may run it, also one that OpenShift draws; state is a volume.
RUN install --directory --mode=0700 --owner=65532 --group=65532 /var/lib/aqua
USER 65532:65532
EXPOSE 7720
ENTRYPOINT ["aqua-batch"]
CMD ["serve"]
