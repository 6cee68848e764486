# The two commands: `make pretrain` and `make test`. Both build the same .venv first. `make test-all` adds the
# long tests, `make test-gpu` runs those that need a GPU.
PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= configs/gpt2_tiny_fp4.json
GPUS   ?=
ARGS   ?=
ifneq ($(GPUS),$(shell echo "$(GPUS)" | grep -Ex '[1-9][0-9]*'))
$(error GPUS=$(GPUS) is not a number of processes: give 1 or more, or leave it out for one for each GPU)
endif
BIN    := $(VENV)/bin
# A free port, because two runs on one machine would collide on the launcher's fixed default port.
FREE_PORT = $$($(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

# One process for each GPU, which is the launcher's default, or two on a machine without GPUs. Only the default
# keeps to CUDA_VISIBLE_DEVICES. "make pretrain GPUS=4" starts four processes.
# Without GPUs the launcher must be told so: it would show hidden ones to the processes that it starts.
COUNT    = import torch; print("deepspeed" if torch.accelerator.device_count() else "DS_ACCELERATOR=cpu deepspeed --num_accelerators 2")
LAUNCHER = $(if $(GPUS),deepspeed --num_accelerators $(GPUS),$$($(BIN)/python -c '$(COUNT)'))

.PHONY: pretrain test test-all test-gpu lint types docs dist install clean

install: $(VENV)/installed

# The stamp file makes the second command start at once. Changed dependencies are installed again.
# Byte code is written by all cores afterwards, because pip compiles on one core. Some packages hold templates
# that do not compile.
$(VENV)/installed: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3,10) <= sys.version_info[:2] <= (3,12) and "megalowbit needs Python 3.10-3.12, not " + sys.version.split()[0] + ": run make PYTHON=python3.11")'
	@echo "installing into $(VENV), once: torch and other packages are downloaded, which takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --editable '.[test,docs]'
	@echo "compiling the installed packages to byte code, which takes seconds to a minute"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

pretrain: install
	@$(if $(GPUS),,echo "counting the GPUs: one process for each")
	env PATH="$(abspath $(BIN)):$$PATH" $(LAUNCHER) --log_level error --master_port $(FREE_PORT) launch/pretrain.py --ds-config $(CONFIG) $(ARGS)

# Many tests wait for processes they started, so three workers of one thread each keep two cores busy. One
# worker runs all tests of a file, because they share fixtures. The order is tests/conftest.py's: longest files first.
# Byte code may be written: otherwise each of some hundred interpreters would compile the same files again.
PYTEST = env -u PYTHONDONTWRITEBYTECODE PATH="$(abspath $(BIN)):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python

QUICK = $(PYTEST) -m pytest -m "not slow and not gpu" -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test: install lint types
	$(QUICK)

# Every test: the quick ones above, then the long ones. pytest's exit code 5 says that ARGS selects no test; only
# one of the two suites may end with it.
test-all: install lint types
	@quick=0; $(QUICK) || quick=$$?; \
	case $$quick in 0|5) ;; *) exit $$quick;; esac; \
	long=0; $(PYTEST) tests/run_long.py $(ARGS) || long=$$?; \
	if [ $$long -eq 5 ]; then exit $$quick; fi; exit $$long

# Tests that need a GPU. All others hide the GPUs (tests/conftest.py), because several ranks would share one.
test-gpu: install
	$(PYTEST) -m pytest -m gpu -rs $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# The docs site, in build/docs/index.html. Every warning is an error: a link to nowhere, a page that the navigation of
# docs/index.md lacks. `make test-all` builds it too (tests/docs/test_site.py).
docs: install
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site -d build/doctrees . build/docs

# Wheel and source distribution, the same bytes wherever they are built; container images take the wheel.
dist: install
	rm -rf dist
	$(BIN)/python tools/build_backend.py dist

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
