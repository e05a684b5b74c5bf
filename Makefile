# Two entry points: `make demo` shows the main job, `make test` proves it. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.kiln-installed

.PHONY: demo test lint test-parts test-pipeline install clean

demo: $(INSTALLED)
	$(BIN)/build-engine smollm2 --sku cpu --out bundles/smollm2
	$(BIN)/kiln run bundles/smollm2 "What is the capital of France?"
	$(BIN)/kiln compare smollm2 bundles/smollm2 --html reports/smollm2.html

test: $(INSTALLED)
	$(MAKE) -j2 --output-sync=target test-pipeline test-parts lint

# Side by side: each of these mostly uses one core. It prints when it is done.
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-parts: $(INSTALLED)
	$(BIN)/pytest tests/engines tests/passes tests/plugins $(wildcard tests/test_*.py)

test-pipeline: $(INSTALLED)
	$(BIN)/pytest tests/pipeline

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt requirements-zoo.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[cpu,models,serve,capi,docs,dev]'
	$(BIN)/pip install --no-deps -r requirements-zoo.txt
	$(BIN)/python -m plugins.build
	touch $@

clean:
	rm -rf $(VENV) bundles reports build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
