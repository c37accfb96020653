# `make` alone lists the targets. Every target uses the environment in .venv, which `make install` builds.

PY := .venv/bin/python
STAMP := .venv/.installed
REDIS7 := .cache/redis7/.tried
PROMETHEUS := .cache/prometheus/.tried
VLLM ?= 0.33.0
KEEP ?=
PYTEST_ARGS ?=
ARGS ?=
# Tests mostly wait: three processes for two cores. Real servers are started by one of them, one test after another.
PARALLEL := -n 3 --dist loadscope --no-loadscope-reorder

# Tests start hundreds of processes, which would compile the project's code each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install test test-unit test-e2e test-contract test-slow test-churn test-faults test-soak lint format demo clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) $(REDIS7) $(PROMETHEUS) ## Build .venv: vLLM (CUDA or CPU), NIXL, this project, its tools; Redis 7, Prometheus for tests

# Rebuilt only when something it is made from changed.
$(STAMP): setup.py pyproject.toml scripts/install.py scripts/runner.py scripts/uv_settings.py
	@python=; \
	for name in python3.11 python3.12 python3.13 python3; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "vllm-pd needs Python 3.11 or newer, and none of python3.11, python3.12, python3.13, python3 on PATH is one." >&2; \
	  exit 1; \
	fi; \
	$$python -m scripts.install && touch $@

# Where it cannot be had, the tests on Redis say why they are skipped; those on Valkey run all the same.
$(REDIS7): scripts/redis7.py scripts/debian_packages.py | $(STAMP)
	@mkdir -p $(@D) && $(PY) -m scripts.redis7 && touch $@

# Likewise: the tests of dashboard and alerts.
$(PROMETHEUS): scripts/prometheus.py scripts/debian_packages.py | $(STAMP)
	@mkdir -p $(@D) && $(PY) -m scripts.prometheus && touch $@

test: install ## Run every test except those marked slow
	$(PY) -m pytest -m "not slow" $(PARALLEL) $(PYTEST_ARGS)

test-unit: install ## Run the tests that start no vLLM server
	$(PY) -m pytest tests/unit -m "not e2e and not slow" $(PARALLEL) $(PYTEST_ARGS)

test-e2e: install ## Run the tests on real vLLM servers
	$(PY) -m pytest tests/e2e -m "not slow" $(PYTEST_ARGS)

test-contract: install ## Check what is used of vLLM against a release's source: VLLM=0.33.0
	$(PY) -m tests.contract --vllm $(VLLM)

test-slow: install ## Run the tests that are left out of `make test` for time (an hour)
	$(PY) -m pytest -m slow --ignore=tests/faults $(PYTEST_ARGS)

test-churn: install ## Ten million blocks stored and evicted: memory must stay flat (ten minutes)
	$(PY) -m pytest tests/unit/agent/test_index_truth.py -m slow $(PYTEST_ARGS)

test-faults: install ## Kill, stop, restart and cut off real vLLM workers, router, store under load (an hour); docs/fault-matrix.md
	$(PY) -m pytest tests/faults -m slow $(PYTEST_ARGS)

test-soak: install ## Mock workers with random faults at 80% of capacity (20 minutes; ARGS=--quick: two)
	$(PY) -m benchmarks.soak $(ARGS)

lint: install ## Check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m scripts.typecheck

format: install ## Apply the style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

demo: install ## Prefill, decode and router answer a question; KEEP=1 leaves them running
	@$(PY) -m scripts.demo $(if $(filter-out 0,$(KEEP)),--keep)

clean: ## Remove the environment, models, caches and logs
	rm -rf .venv .cache logs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
