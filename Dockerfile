# One file, four images, each with the packages that its one process needs:
#
#   docker build --target operator --tag shoal/operator:0.1.0 .          the operator: no ONNX
#   docker build --target coordinator --tag shoal/coordinator:0.1.0 .    a pool's coordinator: no ONNX, no Kubernetes
#   docker build --target worker --tag shoal/worker:0.1.0 .              the `shoal` command, which worker pods run
#   docker build --target agent --tag shoal/agent:0.1.0 .                what runs on a device
#
# Nothing in it depends on the processor: --platform linux/amd64,linux/arm64 builds both. Layers
# stand in the order in which they change: base, packages, code; a change of code makes only the
# last one anew. Both run as user 65532 on a read-only root; they write to /tmp and to volumes.
#
# A tag may name another image tomorrow. Where images must be the same whenever they are built, give
# the base with the digest that your registry has for it, after a look at what it is:
#
#   docker buildx imagetools inspect docker.io/library/python:3.11-slim
#   docker build --build-arg BASE=docker.io/library/python:3.11-slim@sha256:... --target agent .

ARG BASE=docker.io/library/python:3.11-slim
FROM ${BASE} AS base
# The base has no bytecode of Python's own modules, and nobody may write it later: each start would
# compile some 140 of them. For an agent that is 0.2 of 0.5 s of a fast processor, and 3 MiB. Agents
# run without docstrings (-OO), which are 2 MiB of memory, and have bytecode of their own for that.
RUN python3 -m compileall -q -o 0 -o 2 --invalidation-mode unchecked-hash -x '/(test|idlelib|lib2to3)/' \
        "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
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

FROM build AS coordinator-packages
COPY requirements/coordinator.txt /requirements.txt
RUN --mount=type=cache,target=/var/cache/pip packages /requirements.txt

FROM build AS worker-packages
COPY requirements/worker.txt /requirements.txt
RUN --mount=type=cache,target=/var/cache/pip packages /requirements.txt

FROM build AS agent-packages
COPY requirements/agent.txt /requirements.txt
RUN --mount=type=cache,target=/var/cache/pip packages /requirements.txt -OO

# The project's wheel, spread over what each image takes of it.
FROM build AS code
COPY requirements/build.txt /requirements.txt
RUN --mount=type=cache,target=/var/cache/pip packages /requirements.txt
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY api api
COPY planner planner
COPY compiler compiler
COPY coordinator coordinator
COPY operator operator
COPY agent agent
COPY cli cli
COPY hack/image/spread /usr/local/bin/spread
RUN python3 -m pip --python /opt/shoal/bin/python install --quiet --no-compile --no-deps \
        --no-build-isolation --no-index --target /wheel . \
    && python3 -m compileall -q -o 0 -o 2 --invalidation-mode unchecked-hash /wheel \
    && spread operator shoal_operator shoal_api shoal_planner shoal_protocol \
    && spread coordinator shoal_coordinator shoal_protocol \
    && spread worker shoal_cli shoal_coordinator shoal_compiler shoal_planner shoal_api shoal_protocol \
    && spread agent shoal_agent shoal_protocol \
    && mkdir -p /code/worker/opt/shoal/bin && cp -a /wheel/bin/shoal /code/worker/opt/shoal/bin/shoal

FROM base AS operator
ENV PATH=/opt/shoal/bin:$PATH
LABEL org.opencontainers.image.title="Shoal operator" \
      org.opencontainers.image.description="The operator of Shoal: reconciles its kinds on a cluster" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=operator-packages /opt/shoal /opt/shoal
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "shoal_operator"]
COPY --from=code /code/operator /

FROM base AS coordinator
ENV PATH=/opt/shoal/bin:$PATH
LABEL org.opencontainers.image.title="Shoal coordinator" \
      org.opencontainers.image.description="The coordinator of a pool: streams inputs through its devices" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=coordinator-packages /opt/shoal /opt/shoal
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "shoal_coordinator"]
COPY --from=code /code/coordinator /

FROM base AS worker
ENV PATH=/opt/shoal/bin:$PATH
LABEL org.opencontainers.image.title="Shoal worker" \
      org.opencontainers.image.description="The command line of Shoal: fetches, inspects and cuts models, carries inputs and results" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=worker-packages /opt/shoal /opt/shoal
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["shoal"]
COPY --from=code /code/worker /

FROM base AS agent
ENV PATH=/opt/shoal/bin:$PATH
LABEL org.opencontainers.image.title="Shoal agent" \
      org.opencontainers.image.description="The agent of Shoal: runs fragments on a device, within a memory budget" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=agent-packages /opt/shoal /opt/shoal
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-OO", "-m", "shoal_agent"]
COPY --from=code /code/agent /
