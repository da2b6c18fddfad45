# One GPU per rank: docker build -f mpi_scripts/containers/cuda.Dockerfile -t gtopk:cuda .
#
# No CUDA image is needed: torch brings its CUDA libraries, and the host its driver (the NVIDIA container
# toolkit). Set EXTRA=cuda12 or cuda13 to match torch's CUDA.

ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS wheel
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:${PYTHON}-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openmpi-bin openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home mpi
COPY --from=wheel /wheel /wheel
COPY constraints.txt /wheel/
ARG EXTRA=cuda13
RUN pip install --no-cache-dir --constraint /wheel/constraints.txt "$(ls /wheel/*.whl)[mpi,$EXTRA]"
COPY --chown=mpi mpi_scripts/containers/sshd_config /home/mpi/sshd_config
COPY mpi_scripts/containers/ssh_config /etc/ssh/ssh_config.d/job.conf
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/mpi
CMD ["gtopk", "doctor"]
