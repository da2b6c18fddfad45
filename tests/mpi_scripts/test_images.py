"""The images are built, and containers of them do what the pages and the manifest say.

`make test-images` with docker or podman, whichever is there; ENGINE names one. One image only, and
what its build is given besides:

    make test-images ARGS="-k cpu" IMAGE_ARGUMENTS="--build-arg PIP_EXTRA_INDEX_URL=..."
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "mpi_scripts" / "containers").glob("*.Dockerfile"))
MANIFEST = ROOT / "mpi_scripts" / "kubernetes" / "mpijob.yaml"
JOB = ROOT / "tests" / "programs" / "elastic_job.py"
THERE = [name for name in ("docker", "podman") if shutil.which(name)]
ENGINE = os.environ.get("ENGINE") or next(iter(THERE), "docker")

# What Kubeflow's MPI operator sets for a launcher of Open MPI; it mounts the list of hosts.
OPERATOR = {
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}
# A secret as mounted for a group: links to root's files, readable by all.
MAKE_KEYS = """
mkdir ..data && cd ..data
ssh-keygen -q -t ecdsa -b 521 -m PEM -N "" -f id_rsa
cp id_rsa.pub authorized_keys
chmod 644 * && chgrp 1000 *
cd .. && ln -s ..data/* .
"""

pytestmark = [pytest.mark.images, pytest.mark.timeout(3600)]


def engine(*words: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess:
    command = [ENGINE, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    output = f"{shlex.join(command)}:\n{done.stdout}{done.stderr}"
    assert not check or done.returncode == 0, output
    return done


@pytest.fixture(scope="module", params=DOCKERFILES, ids=lambda path: path.name.split(".")[0])
def image(request: pytest.FixtureRequest) -> str:
    name = f"gtopk:{request.param.name.split('.')[0]}"
    more = shlex.split(os.environ.get("IMAGE_ARGUMENTS", ""))
    engine("build", *more, "-f", request.param, "-t", name, ROOT)
    return name


@pytest.fixture
def volume() -> Iterator[Callable[[str, str, str], str]]:
    """Return a function that makes a volume by running shell commands in an image."""
    made: list[str] = []

    def make(image: str, commands: str, given: str = "") -> str:
        made.append(f"gtopk-{uuid.uuid4().hex[:8]}")
        engine("volume", "create", made[-1])
        here = ("--user", "0", "-v", f"{made[-1]}:/volume", "-w", "/volume")
        engine("run", "--rm", "-i", *here, image, "sh", "-euc", commands, input=given)
        return made[-1]

    yield make
    engine("volume", "rm", "--force", *made)


def checkpoints(volume: Callable[[str, str, str], str], image: str) -> str:
    """Return a volume that the group of the pods' users may write to, with the script in it."""
    script = JOB.read_text(encoding="utf-8")
    return volume(image, "chgrp 1000 . && chmod 2775 . && cat > train.py", script)


def test_doctor_finds_the_image_ready_for_several_ranks(image: str) -> None:
    output = engine("run", "--rm", image).stdout
    assert "Ready to train:" in output
    assert re.search(r"kernels +OK +C\+\+", output), output


def test_container_ranks_train_as_a_non_root_user(image: str, volume) -> None:
    work = checkpoints(volume, image)
    launch = "mpirun -n 2 --oversubscribe python train.py"
    here = ("--shm-size", "1g", "-v", f"{work}:/work", "-w", "/work")
    output = engine("run", "--rm", *here, image, "sh", "-c", f"id -un && {launch}").stdout
    assert output.startswith("mpi\n")
    assert len(re.findall(r"^rank \d of 2: samples", output, re.MULTILINE)) == 2, output


def pod(spec: dict[str, Any], volumes: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return a pod's options for the engine, and its command."""
    (container,) = spec["containers"]
    user, rights = spec["securityContext"], container["securityContext"]
    options = ["--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
    options += [f"--cap-drop={each}" for each in rights["capabilities"]["drop"]]
    options += [] if rights["allowPrivilegeEscalation"] else ["--security-opt=no-new-privileges"]
    options += [f"--env={each['name']}={each['value']}" for each in container.get("env", [])]
    for mount in container.get("volumeMounts", []):
        if mount["mountPath"] != "/dev/shm":
            options.append(f"--volume={volumes[mount['name']]}:{mount['mountPath']}")
    options.append("--shm-size=1g")
    return options, [*container["command"], *container["args"]]


@pytest.fixture
def network() -> Iterator[str]:
    name = f"gtopk-{uuid.uuid4().hex[:8]}"
    engine("network", "create", name)
    yield name
    engine("network", "rm", "--force", name)


@pytest.fixture
def workers(image: str, network: str, volume) -> Iterator[dict[str, Any]]:
    """Start the manifest's workers; yield how a launcher is to be started beside them."""
    job, _ = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    kinds = job["spec"]["mpiReplicaSpecs"]
    keys = f"--volume={volume(image, MAKE_KEYS, '')}:{job['spec']['sshAuthMountPath']}:ro"
    volumes = {"checkpoints": checkpoints(volume, image)}
    options, command = pod(kinds["Worker"]["template"]["spec"], volumes)
    names = [f"{network}-worker-{number}" for number in range(kinds["Worker"]["replicas"])]
    hosts = {}
    try:
        for name in names:
            called = ("--name", name, "--hostname", name, "--network", network)
            engine("run", "--detach", *called, keys, *options, image, *command)
            find = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
            address = engine("inspect", "--format", find, name).stdout.strip()
            hosts[f"{name}.{network}-worker.default.svc"] = address
        for name in names:  # stands in for the readiness probe
            deadline = time.monotonic() + 30
            while "Server listening" not in (logs := engine("logs", name)).stderr:
                assert time.monotonic() < deadline, f"{name}: {logs}"
                time.sleep(0.2)
        slots = "".join(f"{host} slots={job['spec']['slotsPerWorker']}\n" for host in hosts)
        listed = f"--volume={volume(image, 'cat > hostfile', slots)}:/etc/mpi:ro"
        options, command = pod(kinds["Launcher"]["template"]["spec"], volumes)
        options += [keys, listed, f"--network={network}"]
        options += [f"--env={name}={value}" for name, value in OPERATOR.items()]
        options += [f"--add-host={host}:{address}" for host, address in hosts.items()]
        yield {"ranks": len(names), "options": options, "command": command}
    finally:
        engine("rm", "--force", *names, check=False)


def test_manifest_job_resumes_after_its_launcher_restarts(
    image: str, workers: dict[str, Any]
) -> None:
    def launch(*arguments: str, commits: str) -> subprocess.CompletedProcess:
        where = f"--env=GTOPK_ELASTIC_DIR=/checkpoints/{commits}"
        words = ("run", "--rm", *workers["options"], where, image, *workers["command"])
        return engine(*words, *arguments, check=False)

    def ended(job: subprocess.CompletedProcess) -> set[str]:
        """Return the ranks' results, without the number of resets."""
        assert job.returncode == 0, job.stdout + job.stderr
        found = re.findall(r"^rank \d of (\d): (.*), \d resets$", job.stdout, re.MULTILINE)
        assert [int(size) for size, _ in found] == [workers["ranks"]] * workers["ranks"]
        return {what for _, what in found}

    lost = launch("1", "1", "2", "/checkpoints/killed", commits="lost")
    assert lost.returncode != 0
    assert "rank 2 is lost" in lost.stderr, lost.stdout + lost.stderr
    (learned,) = ended(launch(commits="lost"))
    assert {learned} == ended(launch(commits="undisturbed"))
