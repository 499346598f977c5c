#!/usr/bin/env bash
# Builds and checks the CUDA half on a machine with one NVIDIA GPU, nvcc, and a python3 that has torch with CUDA,
# setuptools, ninja and pytest:
#
#   tools/gpu_check.sh [--no-build] [--no-tests] [--no-sanitizer] [--no-bench]
#
# It prints a short table, and writes check.json and one log a step to $OUT (default: benchmarks/results). It ends with
# 1 if a step failed. PYTHON names another interpreter; STEP_TIMEOUT the seconds that a step may take (default 240).
#
# This script has not been run on a GPU yet.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
STEP_TIMEOUT=${STEP_TIMEOUT:-240}
mkdir -p "$OUT"
TABLE=$(mktemp)
trap 'rm -f "$TABLE"' EXIT

skip=" "
for flag in "$@"; do
  case $flag in
    --no-build | --no-tests | --no-sanitizer | --no-bench) skip+="${flag#--no-} " ;;
    *)
      sed -n '2,11s/^# \{0,1\}//p' "$0"
      exit 2
      ;;
  esac
done

# step KIND NAME COMMAND...: runs it unless KIND is left out, and notes how it went.
step() {
  local kind=$1 name=$2 started=$SECONDS status
  shift 2
  if [[ $skip == *" $kind "* ]]; then
    printf '%s\tleft out\t0\n' "$name" >>"$TABLE"
    return
  fi
  timeout "$STEP_TIMEOUT" "$@" >"$OUT/$name.log" 2>&1
  status=$?
  case $status in
    0) status=passed ;;
    124) status="out of time" ;;
    *) status="failed ($status)" ;;
  esac
  printf '%s\t%s\t%s\n' "$name" "$status" $((SECONDS - started)) >>"$TABLE"
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
  "$PYTHON" setup.py build_ext --inplace
}

# The rows of the backend "cuda" in all tests that take a backend. The project's own pytest settings are left aside:
# they name plugins that may not be here.
rows() {
  local files
  mapfile -t files < <(grep -rlE 'backend: Kernels' tests --include='test_*.py' | sort)
  "$PYTHON" -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q -W error \
    -W ignore::pytest.PytestUnknownMarkWarning -k "$1" "${files[@]}"
}
all_rows() { rows cuda; }

# A few small rows: torch starts slowly under the sanitizer. Without torch's allocator, every tensor has its own bounds.
sanitize() {
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  export -f rows
  export PYTHON
  compute-sanitizer --tool "$1" --error-exitcode 99 --target-processes all bash -c \
    'rows "cuda and (measure or unscale or reconcile or step_factors or update_scale or two_passes or norms_of_zero)"'
}

# No waiting, graphs, launches, streams, large tensors; the classes against the CPU's, torch's and, where it is, timm's.
gpu_only() {
  "$PYTHON" -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q -rs tests/test_cuda.py \
    -W ignore::pytest.PytestUnknownMarkWarning
}

export -f gpu build rows all_rows gpu_only
export PYTHON
step build build bash -c build
step tests rows bash -c all_rows
step tests gpu_only bash -c gpu_only
if command -v compute-sanitizer >/dev/null; then
  export -f sanitize
  step sanitizer memcheck bash -c "sanitize memcheck"
  step sanitizer racecheck bash -c "sanitize racecheck"
else
  printf 'sanitizer\tnot installed\t0\n' >>"$TABLE"
fi
if [[ -f benchmarks/gpu.py ]]; then
  step bench bench "$PYTHON" -m benchmarks.gpu
else
  printf 'bench\tnone yet\t0\n' >>"$TABLE"
fi

"$PYTHON" - "$TABLE" "$OUT/check.json" <<'END'
import json
import sys

import torch

rows = [line.rstrip("\n").split("\t") for line in open(sys.argv[1])]
for name, status, seconds in rows:
    print(f"{name:20s} {status:14s} {seconds:>4s} s")
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
steps = [dict(zip(("name", "status", "seconds"), row)) for row in rows]
report = {"gpu": gpu, "torch": torch.__version__, "steps": steps}
with open(sys.argv[2], "w") as file:
    json.dump(report, file, indent=1)
sys.exit(any(status.startswith(("failed", "out of time")) for _, status, _ in rows))
END
