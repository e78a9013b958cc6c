# `make` alone lists the targets. Everything is installed into .venv in this directory; a second
# call of any target reinstalls only when setup.cfg or pyproject.toml has changed.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-all test-gpus test-versions test-faults mutants check wheel docs clean lint types rooms apt horovod

PYTHON ?= python3
# what pytest is given, such as PYTEST_ARGS="-k slurm"
PYTEST_ARGS ?=
# what tools/mutants.py is given, such as MUTANTS="dtk/exchange --sample 20"
MUTANTS ?=
# how many pytest share the tests; those of one world of processes stay together (tests/conftest.py)
WORKERS ?= 2

# where `make wheel` and `make docs` write, and more options of `python -m build`
DIST ?= dist
BUILD ?=
SITE ?= site

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --log $(VENV)/pip.log
SETTINGS := setup.cfg pyproject.toml
DEMO := .[examples,mpi]
TEST := .[test,check,examples]
ALL := .[test-all,release,docs]

# command:Debian package
FOR_HOROVOD := g++:g++ make:make mpicxx:libopenmpi-dev mpirun:openmpi-bin
FOR_TESTS := $(FOR_HOROVOD) cmake:cmake ip:iproute2 nft:nftables
# daemons, which Debian starts where it can: for the whole matrix only
FOR_ALL := munged:munge slurmctld:slurmctld slurmd:slurmd srun:slurm-client java:default-jre-headless

# pip's advice about itself is not about dtk
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_ROOT_USER_ACTION = ignore

help:
	@echo 'make demo      train a small network on two processes and compare with one (4 minutes the first time)'
	@echo 'make test      install what the tests need, Horovod included, then lint, types and tests'
	@echo 'make test-fast lint, types and the tests of one process'
	@echo 'make test-all  the same with the whole equivalence matrix, and with Slurm and Java, which it installs'
	@echo 'make test-gpus  the tests of TensorFlow collectives on GPUs that this machine pretends to have'
	@echo 'make test-versions  the tests of one process and a job of two, with every TensorFlow, Keras and Python of tools/versions.txt'
	@echo 'make test-faults  kill and stop ranks and cut links at random moments, for some hours, and say what does not survive'
	@echo 'make mutants   break each room of dtk at random and count the breaks that no test notices'
	@echo 'make check     lint, types and imports only'
	@echo 'make wheel     build the wheel and the source distribution of keras-dtk in dist, and check them'
	@echo 'make docs      build the site of the documentation in site'
	@echo 'make clean     remove .venv and everything built'

demo: $(VENV)/.for-demo
	@$(BIN)/dtk run -n 2 examples/digits_allreduce.py

# DTK_TEST_THREADS=4 gives each rank of a test four threads, as users' ranks have several
test: horovod check
	@$(call run_pytest,-m "not full")

test-fast: check
	@$(call run_pytest,-m "fast and not full")

# the tests of TensorFlow's collectives on GPUs that this machine pretends to have; with
# DTK_TEST_GPUS=real, on one card that all ranks share
test-gpus: export DTK_TEST_GPUS ?= 1
test-gpus: check
	@$(call run_pytest,-m "not full")

test-all: FOR_TESTS += $(FOR_ALL)
test-all: horovod check $(VENV)/.for-test-all
	@$(call run_pytest,--hypothesis-profile search)

# environments of its own, in .versions; ROWS="3.11/2.21.0/3.14.1" tests one of them
test-versions: $(BIN)/python
	@$(BIN)/python tools/versions.py --workers $(WORKERS) $(ROWS)

test-faults: horovod
	@$(BIN)/python tools/faults.py
	@$(BIN)/python tools/soak.py
	@$(BIN)/python tools/small_fits.py
	@$(BIN)/python tools/random_trainings.py
	@$(BIN)/python tools/random_trainings.py --resume --first 1000
	@$(BIN)/python tools/link_faults.py || [ $$? = 2 ]  # which is where no hosts can be made
	@$(BIN)/python tools/lost_host.py || [ $$? = 2 ]
	@$(BIN)/python tools/forwarder_faults.py || [ $$? = 2 ]

mutants: horovod $(VENV)/.for-mutants
	@$(BIN)/python tools/mutants.py $(MUTANTS)

check: lint types rooms

lint: $(VENV)/.for-test
	@echo 'ruff' && $(BIN)/ruff check --quiet --output-format concise .

types: $(VENV)/.for-test
	@echo 'mypy' && $(BIN)/mypy --no-error-summary

rooms: $(VENV)/.for-test
	@echo 'import-linter' && { out=$$($(BIN)/lint-imports --no-cache 2>&1) || { echo "$$out"; exit 1; }; }

wheel: $(VENV)/.for-release
	@rm -f $(DIST)/*.whl $(DIST)/*.tar.gz
	@out=$$($(BIN)/python -m build $(BUILD) --outdir $(DIST) . 2>&1) || { echo "$$out"; exit 1; }
	@$(BIN)/python -m twine check --strict $(DIST)/*
	@$(BIN)/check-wheel-contents $(DIST)/*.whl

# MkDocs Material and TensorFlow say much that is not about the site
docs: export NO_MKDOCS_2_WARNING = 1
docs: export TF_CPP_MIN_LOG_LEVEL = 3
docs: $(VENV)/.for-docs
	@$(BIN)/python -m mkdocs build --quiet --site-dir $(abspath $(SITE))

clean:
	rm -rf $(VENV) .versions build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- installation ---------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	  echo "dtk needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing)."; \
	  echo 'Next: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)'; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo '$(PYTHON) could not make $(VENV). Next, on Debian: apt-get install python3-venv'; exit 1; }

$(VENV)/.for-demo: $(BIN)/python $(SETTINGS)
	@echo 'Installing dtk with TensorFlow and Keras into $(VENV) (a minute or two the first time) ...'
	@$(call pip_install,$(DEMO))
	@touch $@

$(VENV)/.for-test: $(BIN)/python $(SETTINGS)
	@echo 'Installing dtk and what its tests need into $(VENV) (a minute or two the first time) ...'
	@$(call pip_install,$(TEST))
	@touch $@ $(VENV)/.for-demo

$(VENV)/.for-mutants: $(VENV)/.for-test
	@$(call pip_install,.[mutants])
	@touch $@

$(VENV)/.for-release: $(BIN)/python $(SETTINGS)
	@$(call pip_install,.[release])
	@touch $@

$(VENV)/.for-docs: $(BIN)/python $(SETTINGS)
	@$(call pip_install,.[docs])
	@touch $@

$(VENV)/.for-test-all: $(VENV)/.for-test
	@$(call pip_install,$(ALL))
	@touch $@ $(VENV)/.for-release $(VENV)/.for-docs

# Horovod must work wherever it can be built. Where its compiler or MPI cannot be had, the tests that
# need it are skipped, and say so.
horovod: $(VENV)/.for-test apt
	@if [ -e $(VENV)/.horovod ] && [ $(VENV)/.horovod -nt $(VENV)/.for-test ]; then :; \
	elif [ -n "$$($(call missing,$(FOR_HOROVOD)))" ]; then \
	  echo 'Horovod is not built: the tests that need it will be skipped.'; \
	else \
	  { $(BIN)/dtk install-horovod --check >/dev/null 2>&1 || $(BIN)/dtk install-horovod; } \
	  && touch $(VENV)/.horovod; \
	fi

# Debian's Open MPI, a compiler, and for the tests that make hosts of network namespaces iproute2 and nftables
apt:
	@packages="$$($(call missing,$(FOR_TESTS)))"; \
	if [ -z "$$packages" ]; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then \
	  echo "missing: $$packages (Debian's names); this machine has no apt-get, install them by hand"; exit 0; fi; \
	if [ "$$(id -u)" = 0 ]; then as_root=; \
	elif sudo -n true 2>/dev/null; then as_root='sudo -n'; \
	else echo "missing, and only root can install it: sudo apt-get install $$packages"; exit 0; fi; \
	echo "Installing $$packages with apt-get ..."; \
	export DEBIAN_FRONTEND=noninteractive; \
	{ $$as_root apt-get -qq update && $$as_root apt-get -qq install -y --no-install-recommends $$packages; } \
	  >$(VENV)/apt.log 2>&1 || { echo "apt-get failed, $(VENV)/apt.log says why; it ends with:"; \
	  tail -n 5 $(VENV)/apt.log; }

# prints the Debian packages of the command:package pairs whose commands are not here
define missing
for pair in $(1); do \
  PATH="$$PATH:/usr/sbin:/sbin" command -v "$${pair%%:*}" >/dev/null || printf '%s ' "$${pair#*:}"; done
endef

# Twice quiet: errors are shown, and the whole story is in .venv/pip.log. Before dtk was keras-dtk, pip
# called it dtk: with both records the command and the package would have two owners.
define pip_install
if ls $(VENV)/lib/python3*/site-packages/dtk-*.dist-info >/dev/null 2>&1; then \
  $(PIP) uninstall -qq -y dtk; rm -rf dtk.egg-info; fi; \
$(PIP) install -qq --progress-bar off -e '$(1)' || { echo 'pip failed; $(VENV)/pip.log holds all it said'; exit 1; }
endef

# Each of some hundred processes would compile dtk, and what it runs of the tests, where Python is told
# to write no bytecode.
define run_pytest
if [ -e $(VENV)/.horovod ]; then export DTK_REQUIRE_HOROVOD=1; fi; \
$(BIN)/python -m compileall -q dtk tests && \
$(BIN)/python -m pytest -n $(WORKERS) $(1) $(PYTEST_ARGS)
endef
