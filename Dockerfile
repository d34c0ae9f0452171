# docker build --target serve --tag allmlp-serve .     the HTTP server; --target train: the command, for training
# --build-arg VARIANT=cuda                             torch with its CUDA libraries, for `docker run --gpus all`
# --build-arg COMMIT=$(git rev-parse --short=12 HEAD)  what `allmlp --version` prints
# --build-arg BASE=IMAGE                               another Debian image with Python 3.11 or newer and its headers
# --build-arg CPU_WHEELS=ADDRESS                       another index with the CPU build of torch

ARG BASE=python:3.12-slim
FROM $BASE AS build
ARG VARIANT=cpu
ARG CPU_WHEELS=https://download.pytorch.org/whl/cpu
ARG COMMIT=unknown
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
RUN python -m venv /opt/allmlp
COPY constraints.txt constraints-cpu.txt ./
COPY requirements requirements
RUN if [ "$VARIANT" = cpu ]; then /opt/allmlp/bin/pip install --no-deps -c constraints-cpu.txt --index-url "$CPU_WHEELS" torch; \
    else /opt/allmlp/bin/pip install -c constraints.txt torch; fi
RUN /opt/allmlp/bin/pip install --no-deps --require-hashes -r requirements/run.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
COPY weights weights
RUN ALLMLP_COMMIT="$COMMIT" /opt/allmlp/bin/pip install --no-build-isolation -c constraints.txt '.[train,analysis,serve]'

# The root file system may be read-only: caches and compiled code go to /tmp (--tmpfs /tmp:exec), runs to /workspace/runs (--volume .:/workspace).
FROM $BASE AS base
ARG VARIANT=cpu
# Triton calls a C compiler, torch.compile a C++ compiler.
RUN if [ "$VARIANT" = cuda ]; then apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; fi
COPY --from=build /opt/allmlp /opt/allmlp
RUN useradd --uid 1000 --no-create-home allmlp && install --directory --owner=allmlp /workspace
ENV PATH=/opt/allmlp/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000
WORKDIR /workspace

FROM base AS train
ENTRYPOINT ["allmlp"]
CMD ["--help"]

FROM base AS serve
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["allmlp", "serve", "--host", "0.0.0.0", "--port", "8000"]
