# deltabox: what one types. `make setup` once, then `make demo` or `make check`.
PY := .venv/bin/python
MYPY_FLAGS :=

.PHONY: setup demo check lint types imports native test bench nightly dist lock clean

setup: .venv/.done  ## a virtual environment in .venv, with deltabox and its tools

.venv/.done: requirements.lock pyproject.toml native/build.py $(wildcard native/*.c)
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: setup  ## a scripted agent on a sample project, ending in the approval card
	.venv/bin/deltabox demo

check: setup lint types imports native test  ## everything a change must pass, under 5 minutes

lint:
	$(PY) -m ruff format --check --quiet .
	$(PY) -m ruff check --quiet .

types:
	$(PY) -m mypy $(MYPY_FLAGS)

imports:
	.venv/bin/lint-imports --no-cache

native:
	$(PY) native/build.py

test: setup
	$(PY) -m pytest -q

bench: setup
	$(PY) -m bench --json bench/out/latest.json

nightly: setup  ## the long ones: soak, big trees, thousands of random cases
	DELTABOX_NIGHTLY=1 $(PY) -m pytest -q -m "nightly or not nightly"
	$(PY) -m bench --json bench/out/nightly.json

dist: setup
	$(PY) -m hatchling build

# For whoever raises a version. No header and no annotations: they would name a registry's host.
lock:
	uv pip compile --quiet --extra dev --universal --generate-hashes --no-header --no-annotate --no-emit-index-url -o requirements.lock pyproject.toml

clean:
	rm -rf .venv build dist deltabox/_native .mypy_cache .ruff_cache .pytest_cache .hypothesis
