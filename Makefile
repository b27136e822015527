# make setup   a virtual environment with everything, in .venv (again only when pyproject.toml or constraints.txt change)
# make demo    see recall and eviction at work
# make test    the tests that need no accelerator and take minutes at most
# make lint    formatting, lint, types
# make bench   the measurements, into bench-out/; BENCH_ARGS="--data DIR" names the folder with the texts
.PHONY: setup demo test lint bench
.DEFAULT_GOAL := setup

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# Two processes of one thread each are done sooner than one of two.
PYTEST_ARGS ?= -n 2
BENCH_ARGS ?=
# A benchmark, and after a colon the part of it.
BENCHES := fidelity recall:answers recall:evidence summaries replay ops

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "memstream needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[cpu,plots,postgres,ray,serve,dev]"
	$(BIN)/memstream models pull smollm2-135m minilm-l6-v2
	@touch $@

demo: setup
	$(BIN)/memstream demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not bench and not gpu" $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	@set -e; for bench in $(BENCHES); do \
		part=$${bench#"$${bench%%:*}"}; echo "== $$bench"; \
		$(BIN)/python "tests/bench/$${bench%%:*}.py" $${part#:} $(BENCH_ARGS); done
