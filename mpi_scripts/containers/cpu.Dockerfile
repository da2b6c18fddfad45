# Ranks on CPUs, over MPI: docker build -f mpi_scripts/containers/cpu.Dockerfile -t gtopk:cpu .
#
# Two stages, so that the compiler that builds the wheel stays out of the image. Open MPI is Debian's.
# Processes run as the user `mpi`, not as root; a launcher reaches them through their own SSH daemon.

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
# With an index that has torch without CUDA, the image is a tenth of the size.
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir --constraint /wheel/constraints.txt "$(ls /wheel/*.whl)[mpi]"
COPY --chown=mpi mpi_scripts/containers/sshd_config /home/mpi/sshd_config
COPY mpi_scripts/containers/ssh_config /etc/ssh/ssh_config.d/job.conf
USER 1000
WORKDIR /home/mpi
CMD ["gtopk", "doctor"]
