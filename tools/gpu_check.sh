#!/usr/bin/env bash
# Builds and checks the CUDA half on a machine with one NVIDIA GPU, nvcc, and a python3 that has torch with CUDA,
# setuptools, ninja and pytest:
#
#   tools/gpu_check.sh [--no-build] [--no-tests] [--no-sanitizer] [--no-report] [--no-optimizers] [--no-batchnorm]
#                      [--no-training]
#
# It ends with a short table, and writes gpu_check.json (steps, and every ratio with its goal) and one log a step to
# $OUT (default: benchmarks/results/gpu). It ends with 1 if a step failed. PYTHON names another interpreter, LIMIT the
# seconds that all of it may take (default 480): what comes too late is left out, and the table says so. Without
# Lightning, training steps are compared with torch's autocast and GradScaler; without rich, timm or matplotlib, tables
# are plain, some peers are missing and there are no pictures.
#
# This script has not been run on a GPU yet.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/gpu}
LIMIT=${LIMIT:-480}
JOBS=${MAX_JOBS:-$(nproc)}
export PYTHON OUT MAX_JOBS=$JOBS PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
BEGAN=$(date +%s)
mkdir -p "$OUT"
TABLE=$(mktemp)
trap 'rm -f "$TABLE"' EXIT

skip=" "
for flag in "$@"; do
  case $flag in
    --no-build | --no-tests | --no-sanitizer | --no-report | --no-optimizers | --no-batchnorm | --no-training)
      skip+="${flag#--no-} "
      ;;
    *)
      sed -n '2,14s/^# \{0,1\}//p' "$0"
      exit 2
      ;;
  esac
done

note() { printf '%s\t%s\t%s\n' "$@" >>"$TABLE"; }

# step KIND NAME SECONDS COMMAND...: runs it unless KIND is left out or time is up, and notes how it went.
step() {
  local kind=$1 name=$2 limit=$3 started=$SECONDS left=$((LIMIT - SECONDS)) status
  shift 3
  if [[ $skip == *" $kind "* ]]; then
    note "$name" "left out" 0
    return
  fi
  if ((left < 10)); then
    note "$name" "no time left" 0
    return
  fi
  printf '==> %s\n' "$name"
  timeout --kill-after=10 $((limit < left ? limit : left)) "$@" >"$OUT/$name.log" 2>&1
  status=$?
  case $status in
    0) status=passed ;;
    124 | 137) status="out of time" ;;
    *) status="failed ($status)" ;;
  esac
  note "$name" "$status" $((SECONDS - started))
  [[ $status == passed ]] || tail -n 15 "$OUT/$name.log"
}

gpu() {
  "$PYTHON" - <<'END'
import torch

major, minor = torch.cuda.get_device_capability()
print(f"{major}.{minor}")
END
}

build() {
  TORCH_CUDA_ARCH_LIST=$(gpu) || {
    echo "torch sees no GPU"
    return 1
  }
  export TORCH_CUDA_ARCH_LIST LIGHTNING_APEX_CUDA=1
  if "$PYTHON" -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)'; then
    "$PYTHON" setup.py build_ext --inplace
    return
  fi
  # An older setuptools cannot read the project's metadata, of which a build in place needs the version alone.
  local tree
  tree=$(mktemp -d)
  cp -r setup.py csrc lightning_apex "$tree"
  grep '^version = ' pyproject.toml >"$tree/pyproject.toml"
  (cd "$tree" && "$PYTHON" setup.py build_ext --inplace) && cp "$tree"/lightning_apex/_C*.so lightning_apex/
}

# pytest without the project's own settings, which name plugins that may not be here.
tests() { "$PYTHON" -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q -rs "$@"; }

# The rows of the backend "cuda" in all tests that take a backend.
rows() {
  local files
  mapfile -t files < <(grep -rlE 'backend: Kernels' tests --include='test_*.py' | sort)
  tests -W ignore::pytest.PytestUnknownMarkWarning -k "$1" "${files[@]}"
}

# A few small rows: torch starts slowly under the sanitizer. Without torch's allocator, every tensor has its own bounds.
sanitize() {
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  compute-sanitizer --tool "$1" --error-exitcode 99 --target-processes all bash -c \
    'rows "cuda and (measure or unscale or reconcile or step_factors or update_scale or two_passes or norms_of_zero)"'
}

# No waiting, graphs, launches, streams, large tensors; the classes against the CPU's, torch's and, where it is, timm's.
gpu_only() { tests tests/test_cuda.py -W ignore::pytest.PytestUnknownMarkWarning; }

benchmark() { "$PYTHON" -m "benchmarks.$1" --out "$OUT" --rounds "$2"; }

export -f gpu build tests rows sanitize gpu_only benchmark
step build build 180 bash -c build
step tests rows 120 bash -c 'rows cuda'
step tests gpu_only 60 bash -c gpu_only
step report kernels 60 "$PYTHON" tools/kernel_report.py --json "$OUT/kernels.json"
step optimizers optimizers 90 bash -c 'benchmark gpu 15'
step batchnorm batchnorm 45 bash -c 'benchmark gpu_batchnorm 15'
step training training 120 bash -c 'benchmark gpu_training 8'
if command -v compute-sanitizer >/dev/null; then
  step sanitizer memcheck 90 bash -c 'sanitize memcheck'
  step sanitizer racecheck 90 bash -c 'sanitize racecheck'
else
  note sanitizer "not installed" 0
fi

"$PYTHON" tools/gpu_summary.py "$TABLE" "$OUT" "$BEGAN"
