# Everything a newcomer or a developer types. `make` alone lists it. Needs GNU make, bash, Python >= 3.10 and g++.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.11,<2.16
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=
ifeq ($(origin CXX),default)
CXX := g++
endif
export CXX TORCH

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps
# The extension is built in place, so its stamp lies in the tree: another VENV or another torch builds it again.
BUILT := build/stamps/extension
SOURCES := $(shell find csrc 2>/dev/null) setup.py pyproject.toml
CXX_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

say = @printf '==> %s\n' $(1)
fail = { printf '\nerror: %s\n' $(1) >&2; exit 1; }

##@ To try it
demo: preflight $(BUILT)  ## Train a small classifier at several opt levels (a minute or two once built)
	$(call say,"examples/digits.py (a minute or two)")
	@$(PY) examples/digits.py $(DEMO_ARGS)

test: preflight $(BUILT)  ## Run the tests; PYTEST_ARGS="-m slow", "-k adam", ...
	$(call say,"the CUDA kernels$(,) compiled for the host (tests/simt; a minute the first time)")
	@$(PY) tests/simt/build.py
	$(call say,"pytest -n $(WORKERS)$(if $(PYTEST_ARGS), $(subst ",\",$(PYTEST_ARGS))) (ten minutes on two cores)")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

build: preflight $(BUILT)  ## Make $(VENV), install torch and build the extension, no more

##@ To change it
lint: $(STAMPS)/dev  ## ruff, mypy --strict, clang-format: complains, changes nothing
	$(call say,"ruff check$(,) ruff format --check$(,) mypy$(,) clang-format (about a minute the first time)")
	@status=0; \
	$(VENV)/bin/ruff check . || status=1; \
	$(VENV)/bin/ruff format --check . || status=1; \
	$(PY) -m mypy || status=1; \
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES) || status=1; \
	[ $$status = 0 ] || $(call fail,"see above; 'make format' mends what can be mended by itself")

format: $(STAMPS)/dev  ## Let ruff and clang-format rewrite the files
	@$(VENV)/bin/ruff check --fix --exit-zero --quiet .
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/clang-format -i $(CXX_FILES)

docs: $(STAMPS)/docs  ## Build the documentation site into build/site; any warning is an error
	$(call say,"mkdocs (seconds)")
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@printf "    build/site/index.html\n"

bench: preflight $(BUILT)  ## Run every benchmark: ours, each peer and the memory roofline (some minutes)
	$(call say,"benchmarks.optimizers$(,) batchnorm and step (some ten minutes; quieter machine$(,) better figures)")
	@$(PY) -m benchmarks.optimizers $(BENCH_ARGS)
	@$(PY) -m benchmarks.batchnorm $(BENCH_ARGS)
	@$(PY) -m benchmarks.step $(BENCH_ARGS)

clean:  ## Remove what was built, keep $(VENV)
	rm -rf build dist *.egg-info lightning_apex/_C*.so lightning_logs .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean  ## Remove $(VENV) too
	rm -rf $(VENV)

help:  ## This list
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z]+:.*## / { sub(/\$$\(VENV\)/, "$(VENV)"); printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nSettings (make test NAME=value)\n'
	@printf '  %-16s %s\n' \
	  PYTHON '$(PYTHON): the Python (>= 3.10) that $(VENV) is made with' \
	  VENV '$(VENV): the virtual environment; may be one you have' \
	  TORCH '$(TORCH): what pip installs, e.g. torch==2.13.0' \
	  PIP_ARGS 'further words for pip, e.g. --index-url for CPU-only torch' \
	  CXX '$(CXX): the C++ compiler' \
  WORKERS '$(WORKERS): how many processes run tests; 0 for one that a debugger can enter' \
	  MAX_JOBS 'compilations at a time; default: what cores and memory allow' \
	  LIGHTNING_APEX_CUDA 'auto (default): CUDA when torch and nvcc have it; 0: never; 1: or fail'

# Asked before anything large is fetched, so that a missing compiler shows within a second.
preflight:
	@[ -e $(PY) ] || { $(check_python); }
	@[ -e $(BUILT) ] || { $(check_compiler); }

define check_python
command -v $(PYTHON) >/dev/null || \
  $(call fail,"there is no '$(PYTHON)' here. Install Python 3.10 or newer$(,) or name one: make PYTHON=/path/to/python3"); \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
  $(call fail,"$(PYTHON) is $$($(PYTHON) -V 2>&1)$(,) and 3.10 or newer is needed. Name another: make PYTHON=/path/to/python3"); \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
  $(call fail,"$(PYTHON) has no venv module. On Debian or Ubuntu: apt install python3-venv")
endef

define check_compiler
command -v $(firstword $(CXX)) >/dev/null || \
  $(call fail,"there is no C++ compiler '$(CXX)'. On Debian or Ubuntu: apt install g++. Or name one: make CXX=clang++"); \
python=$(PY); [ -x "$$python" ] || python=$(PYTHON); \
"$$python" -c 'import os, sysconfig as s; os.stat(os.path.join(s.get_paths()["include"], "Python.h"))' 2>/dev/null || \
  $(call fail,"$$python comes without its C headers (Python.h). On Debian or Ubuntu: apt install python3-dev")
endef

$(PY):
	@$(check_python)
	$(call say,"[1/4] virtual environment $(VENV) with $$($(PYTHON) -V) (seconds)")
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; $(call fail,"no virtual environment: see above. On Debian or Ubuntu: apt install python3-venv"); }

# A settings file is written only when the text changes; then, and only then, what depends on it is made again.
remember = @mkdir -p $(@D); [ "$$(cat $@ 2>/dev/null)" = $(1) ] || printf '%s\n' $(1) >$@

$(STAMPS)/torch.settings: FORCE | $(PY)
	$(call remember,"$$TORCH $(PIP_ARGS)")

$(STAMPS)/torch: $(STAMPS)/torch.settings
	$(call say,"[2/4] $$TORCH and the build tools (half a minute with a CPU torch$(,) up to ten with a CUDA one: 3 GB)")
	@$(call requirements,build)
	@quiet=--quiet; [ ! -t 1 ] || quiet=; \
	$(PIP) install $$quiet --upgrade "$$TORCH" -r $(STAMPS)/requirements.txt $(PIP_ARGS) || \
	  $(call fail,"pip could not install '$$TORCH' for $$($(PY) -V). Its last lines above say why: no network$(,) no room$(,) or no such \
	torch for this Python. '$(PY) -m pip index versions torch' lists what there is; then: make TORCH=torch==VERSION")
	@$(PY) -W ignore -c 'import torch; print("    torch", torch.__version__, "with CUDA" if torch.version.cuda else "for the CPU")'
	@touch $@

$(STAMPS)/packages: $(STAMPS)/torch pyproject.toml
	$(call say,"[3/4] Lightning and what tests and demo need (half a minute)")
	@$(call requirements,run cli test demo)
	@$(PIP) install --quiet "$$TORCH" -r $(STAMPS)/requirements.txt $(PIP_ARGS) || \
	  $(call fail,"pip could not install the dependencies that pyproject.toml lists: see above")
	@touch $@

$(STAMPS)/dev: $(STAMPS)/packages
	$(call say,"ruff$(,) mypy$(,) clang-format (seconds)")
	@$(call requirements,dev)
	@$(PIP) install --quiet -r $(STAMPS)/requirements.txt $(PIP_ARGS) || \
	  $(call fail,"pip could not install the 'dev' extra of pyproject.toml: see above")
	@touch $@

# Docstrings are read, not imported: this needs neither torch nor the extension.
$(STAMPS)/docs: pyproject.toml | $(PY)
	$(call say,"mkdocs$(,) mkdocstrings (half a minute)")
	@mkdir -p $(STAMPS)
	@$(call requirements,docs)
	@$(PIP) install --quiet -r $(STAMPS)/requirements.txt $(PIP_ARGS) || \
	  $(call fail,"pip could not install the 'docs' extra of pyproject.toml: see above")
	@touch $@

build/stamps/settings: FORCE
	$(call remember,"$(VENV) cxx=$(CXX) cuda=$${LIGHTNING_APEX_CUDA:-auto} arch=$${TORCH_CUDA_ARCH_LIST:-}")

$(BUILT): $(STAMPS)/packages build/stamps/settings $(SOURCES) $(if $(wildcard lightning_apex/_C*.so),,FORCE)
	@$(check_compiler)
	@export MAX_JOBS=$${MAX_JOBS:-$$($(PY) -c "$$PY_JOBS")}; \
	printf '==> [4/4] the extension with %s, %s file(s) at a time (the first time 2-5 minutes, with CUDA 5-15)\n' '$(CXX)' "$$MAX_JOBS"; \
	$(PIP) install --verbose --no-build-isolation --no-deps --config-settings editable_mode=compat --editable . 2>&1 | tee build/build.log | $(ninja_lines) || { \
	  grep -E -A3 -m6 '[):] (fatal )?error:|undefined reference|^ *[A-Za-z]*Error: |Killed' build/build.log | cut -c1-300 >&2 || \
	    tail -n 30 build/build.log >&2; \
	  $(call fail,"the extension did not build: first errors above$(,) everything in build/build.log. Out of memory? make MAX_JOBS=1. \
	CUDA trouble? LIGHTNING_APEX_CUDA=0 make test builds for the CPU alone"); }
	@touch $@

# What ninja says, a line a file, without its long commands.
ninja_lines = awk 'match($$0, /\[[0-9]+\/[0-9]+\]/) { step = substr($$0, RSTART, RLENGTH); \
  if (match($$0, /csrc\/[A-Za-z0-9_\/.-]+\.(cpp|cu)/)) { print "    " step " " substr($$0, RSTART, RLENGTH); fflush() } }'

# A compilation with torch's headers takes up to 3 GB.
define PY_JOBS
import os
cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
try:
    free = int(next(x for x in open('/proc/meminfo') if x.startswith('MemAvailable')).split()[1]) >> 20
except (OSError, StopIteration):
    free = 3 * cores
print(max(1, min(cores, free // 3)))
endef
export PY_JOBS

# The requirements that pyproject.toml lists: `build` and `run`, or the name of an extra.
define PY_REQUIREMENTS
import sys
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open('pyproject.toml', 'rb') as file:
    data = tomllib.load(file)
table = {'build': data['build-system']['requires'], 'run': data['project']['dependencies']}
table.update(data['project']['optional-dependencies'])
print('\n'.join(x for name in sys.argv[1:] for x in table[name]))
endef
export PY_REQUIREMENTS
requirements = $(PY) -c "$$PY_REQUIREMENTS" $(1) >$(STAMPS)/requirements.txt

, := ,
FORCE:
.PHONY: FORCE demo test build lint format docs bench clean distclean help preflight
