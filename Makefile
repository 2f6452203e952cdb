# Bitbench: studies, tests and reports. `make help` lists every target.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
PRESET ?=
STUDY ?= determinism
ARGS ?=

export MLFLOW_DISABLE_TELEMETRY = true
export DO_NOT_TRACK = true
export RAY_USAGE_STATS_ENABLED = 0
export HF_HUB_OFFLINE = 1
export MPLBACKEND = Agg
export TRITON_DISABLE_LINE_INFO = 1

ifeq ($(VENV),none)
PY = $(PYTHON)
setup:
else
PY = $(VENV)/bin/python
setup:
	@$(PYTHON) -m suite.setup_env --venv $(VENV) --torch "$(TORCH)" --triton "$(TRITON)"
endif

PRESET_FLAG = $(if $(PRESET),--preset $(PRESET))
EMBEDDED = env -u MLFLOW_TRACKING_URI -u SUITE_STATE

.DEFAULT_GOAL := help
.PHONY: help setup study-demo test soak ui report

help: ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## build .venv (every other target does it where needed)

study-demo: setup ## the determinism study on this CPU: runs, judges, writes HTML and PDF
	@$(EMBEDDED) $(PY) -m suite run determinism --preset cpu; status=$$?; $(EMBEDDED) $(PY) -m suite report determinism --preset cpu && exit $$status

study-%: setup ## run a study (PRESET=..., ARGS="--stop-after 9m" ...), then its report where MLflow is installed
	@$(PY) -m suite run $* $(PRESET_FLAG) $(ARGS); status=$$?; if [ $$status -ne 2 ] && $(PY) -c "import mlflow" 2>/dev/null; then $(PY) -m suite report $* $(PRESET_FLAG); fi; exit $$status

test: setup ## all tests but the long ones
	@$(EMBEDDED) $(PY) -m tests

soak: setup ## the long tier: fault episodes, coverage simulations; writes reports/published/soak.json
	@$(EMBEDDED) $(PY) -m tests --soak

ui: setup ## the MLflow UI on http://127.0.0.1:5000, on the store that the runs wrote to
	@$(PY) -m suite ui

report: setup ## the report of STUDY (default determinism) from what is stored
	@$(PY) -m suite report $(STUDY) $(PRESET_FLAG)
