# One file, two images:
#
#   docker build --target operator --tag shoal/operator:0.1.0 .    the operator, coordinators, workers, the `shoal` command
#   docker build --target agent --tag shoal/agent:0.1.0 .          what runs on a device: no onnx, no Kubernetes
#
# Nothing in it depends on the processor: --platform linux/amd64,linux/arm64 builds both. Layers
# stand in the order in which they change: base, packages, code; a change of code makes only the
# last one anew. Both run as user 65532 on a read-only root; they write to /tmp and to volumes.

FROM docker.io/library/python:3.11-slim AS base
RUN echo 'shoal:x:65532:65532:Shoal:/tmp:/sbin/nologin' >> /etc/passwd \
    && echo 'shoal:x:65532:' >> /etc/group
ENV HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

FROM base AS build
# Below /var and not in a home, so that both ways to build share it.
ENV PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1
COPY hack/image/packages /usr/local/bin/packages

FROM build AS operator-packages
COPY requirements/operator.txt /requirements.txt
RUN --mount=type=cache,target=/var/cache/pip packages /requirements.txt

FROM build AS agent-packages
COPY requirements/agent.txt /requirements.txt
RUN --mount=type=cache,target=/var/cache/pip packages /requirements.txt

# The project's wheel, spread over what each image takes of it.
FROM build AS code
COPY requirements/build.txt /requirements.txt
RUN --mount=type=cache,target=/var/cache/pip packages /requirements.txt
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY operator operator
COPY agent agent
RUN python3 -m pip --python /opt/shoal/bin/python install --quiet --no-compile --no-deps \
        --no-build-isolation --no-index --target /wheel . \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /wheel \
    && site=$(echo /opt/shoal/lib/python3*/site-packages) \
    && mkdir -p "/code/operator$site" "/code/agent$site" /code/operator/opt/shoal/bin \
    && cp -a /wheel/shoal_operator /wheel/shoal_protocol /wheel/*.dist-info "/code/operator$site" \
    && cp -a /wheel/shoal_agent /wheel/shoal_protocol /wheel/*.dist-info "/code/agent$site" \
    && cp -a /wheel/bin/shoal /code/operator/opt/shoal/bin/shoal

FROM base AS operator
ENV PATH=/opt/shoal/bin:$PATH
LABEL org.opencontainers.image.title="Shoal operator" \
      org.opencontainers.image.description="The operator, coordinators and workers of Shoal, and its command line" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=operator-packages /opt/shoal /opt/shoal
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["shoal"]
COPY --from=code /code/operator /

FROM base AS agent
ENV PATH=/opt/shoal/bin:$PATH
LABEL org.opencontainers.image.title="Shoal agent" \
      org.opencontainers.image.description="The agent of Shoal: runs fragments on a device, within a memory budget" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=agent-packages /opt/shoal /opt/shoal
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "shoal_agent"]
COPY --from=code /code/agent /
