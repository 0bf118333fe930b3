# `make demo` and `make test` do all set-up on a fresh machine with Python 3.10 or newer.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Without an NVIDIA driver the build of torch for CPUs is enough; pip takes it from wherever it is configured to look.
CPU_TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
DEPENDENCIES := $(VENV)/.dependencies
FILES := $(VENV)/.files
INSTALLED := $(VENV)/.installed
EDITABLE := --config-settings editable_mode=strict

.PHONY: demo test test-slow lint install clean FORCE

demo: $(INSTALLED)
	$(BIN)/zellige-train recipe=demo $(ARGS)

# Tests start several processes themselves: one thread each.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(ARGS)

test-slow: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell zellige_lightning recipes conf tests docs hydra_plugins README.md

install: $(INSTALLED)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed; name it: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(DEPENDENCIES): pyproject.toml setup.py | $(VENV)/.created
	@if command -v nvidia-smi >/dev/null || [ -e /proc/driver/nvidia/version ]; then :; else \
		echo "No NVIDIA driver: installing $(CPU_TORCH) first"; $(BIN)/python -m pip install -q "$(CPU_TORCH)"; fi
	$(BIN)/python -m pip install -q $(EDITABLE) -e '.[demo,dev]'
	@touch $@

# A strict editable install links the files it finds, so a new file needs another (quick) install.
$(FILES): FORCE | $(VENV)/.created
	@find zellige_lightning conf recipes hydra_plugins -name '*.py' -o -name '*.yaml' | LC_ALL=C sort > $@.now
	@if cmp -s $@.now $@; then rm $@.now; else mv $@.now $@; fi

$(INSTALLED): $(DEPENDENCIES) $(FILES)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation $(EDITABLE) -e .
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
