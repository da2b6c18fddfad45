"""The container files and the manifest agree with each other, and pass their linters."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "mpi_scripts" / "containers"
MANIFEST = ROOT / "mpi_scripts" / "kubernetes" / "mpijob.yaml"
DOCKERFILES = sorted(CONTAINERS.glob("*.Dockerfile"))


@pytest.fixture(scope="module")
def manifest() -> list[Any]:
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


def pods(job: Any) -> dict[str, Any]:
    return {name: each["template"]["spec"] for name, each in job["spec"]["mpiReplicaSpecs"].items()}


def test_manifest_starts_as_many_ranks_as_slots(manifest: list[Any]) -> None:
    job, _ = manifest
    workers = job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    (launcher,) = pods(job)["Launcher"]["containers"]
    ranks = launcher["args"][launcher["args"].index("-n") + 1]
    assert int(ranks) == workers * job["spec"]["slotsPerWorker"]


def test_manifest_exports_launcher_variables_to_ranks(manifest: list[Any]) -> None:
    (launcher,) = pods(manifest[0])["Launcher"]["containers"]
    words = launcher["args"]
    handed_on = [after for word, after in pairwise(words) if word == "-x"]
    assert handed_on == [each["name"] for each in launcher["env"]]


def test_containers_and_pods_do_not_run_as_root(manifest: list[Any]) -> None:
    for spec in pods(manifest[0]).values():
        assert spec["securityContext"]["runAsNonRoot"]
        for container in spec["containers"]:
            assert not container["securityContext"]["allowPrivilegeEscalation"]
    user = pods(manifest[0])["Worker"]["securityContext"]["runAsUser"]
    for path in DOCKERFILES:
        text = path.read_text(encoding="utf-8")
        assert f"useradd --uid {user} --create-home mpi" in text
        assert f"\nUSER {user}\n" in text


def test_ssh_client_server_and_probe_use_one_port_and_key_folder(manifest: list[Any]) -> None:
    daemon, client = ((CONTAINERS / n).read_text().split() for n in ("sshd_config", "ssh_config"))
    assert daemon[daemon.index("Port") + 1] == client[client.index("Port") + 1]
    (worker,) = pods(manifest[0])["Worker"]["containers"]
    probed = worker["readinessProbe"]["tcpSocket"]["port"]
    assert str(probed) == daemon[daemon.index("Port") + 1]
    keys = manifest[0]["spec"]["sshAuthMountPath"]
    assert daemon[daemon.index("HostKey") + 1].startswith(f"{keys}/")
    for path in DOCKERFILES:
        assert f" {worker['args'][-1]}\n" in path.read_text(encoding="utf-8")


def test_manifest_restarts_failed_pods(manifest: list[Any]) -> None:
    # The operator overrides a template's restartPolicy, for workers with "Never" by default.
    for replicas in manifest[0]["spec"]["mpiReplicaSpecs"].values():
        assert replicas["restartPolicy"] == "OnFailure"
        assert "restartPolicy" not in replicas["template"]["spec"]


def test_network_policy_admits_only_pods_of_the_job(manifest: list[Any]) -> None:
    job, policy = manifest
    own_pods = {"matchLabels": {"training.kubeflow.org/job-name": job["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == own_pods
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own_pods}]}]


def test_dockerfile_copy_sources_exist() -> None:
    for path in DOCKERFILES:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("COPY") and "--from" not in line:
                *sources, _ = [word for word in line.split()[1:] if not word.startswith("--")]
                assert all((ROOT / source).exists() for source in sources)


def lint(*words: str | Path) -> str:
    """Run a linter of this environment; return what it says."""
    program = shutil.which(str(words[0]), path=Path(sys.executable).parent)
    if program is None:
        pytest.skip(f"{words[0]} is not installed: make test-packaging")
    done = subprocess.run(
        [program, *map(str, words[1:])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.packaging
def test_hadolint_finds_nothing() -> None:
    lint("hadolint", "--config", CONTAINERS / "hadolint.yaml", *DOCKERFILES)


@pytest.mark.packaging
def test_yamllint_finds_nothing() -> None:
    settings = MANIFEST.parent / ".yamllint"
    lint("yamllint", "--strict", "-c", settings, MANIFEST, CONTAINERS / "hadolint.yaml")


@pytest.mark.packaging
def test_pods_and_network_policy_match_kubernetes_schemas(
    manifest: list[Any], tmp_path: Path
) -> None:
    # MPIJob has no published schema; its pods are ordinary ones.
    job, policy = manifest
    templates = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}, "spec": spec}
        for name, spec in pods(job).items()
    ]
    known = tmp_path / "known.yaml"
    known.write_text(yaml.safe_dump_all([*templates, policy]))
    output = lint("kubernetes-validate", "--strict", known)
    assert output.count("passed") == 3
