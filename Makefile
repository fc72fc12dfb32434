# One command per habit. `make` makes its own .venv; a second `make` does not reinstall.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DOCS_READY := .venv/.docs-ready
JOBS ?= auto
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-long mistakes mutants docs docs-long check format bench clean

demo: $(READY)  ## train, attack and look inside on the embedded digits; ends with the path of a page
	$(BIN)/vitruvius demo

test: $(READY)  ## the test suite, without what is marked long
	$(BIN)/pytest -n $(JOBS)

test-long: $(READY)  ## the tests that take minutes each
	$(BIN)/pytest -n $(JOBS) -m long --timeout 3600

mistakes: $(READY)  ## every generated mistake over all verbs; `make test` tries some of them
	EVERY_MISTAKE=1 $(BIN)/pytest -n $(JOBS) tests/test_generated_mistakes.py tests/test_generated_calls.py

mutants: $(READY)  ## break every guard on purpose, one by one; the tests must notice (minutes)
	$(BIN)/python scripts/mutants.py

docs: $(DOCS_READY)  ## the site, with every warning an error and all links checked; ends with the path of its first page
	NO_MKDOCS_2_WARNING=1 $(BIN)/python scripts/build_site.py

docs-long: $(READY)  ## the commands of README and docs that take minutes, in reading order
	$(BIN)/pytest -n $(JOBS) -m long --timeout 3600 tests/docs

check: $(READY)  ## format, lint, types, layers, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n $(JOBS)

format: $(READY)  ## rewrite the code in our style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## measure speed against the references, as ratios from one run
	for file in benchmarks/*.py; do $(BIN)/python $$file || exit 1; done

clean:  ## remove everything that make has made
	rm -rf .venv build .mypy_cache .ruff_cache .import_linter_cache

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $(DOCS_READY)
