#!/usr/bin/env bash
# Compiles all sources against the headers of other torch versions, without installing them:
#
#   tools/check_headers.sh 2.11.0 2.12.1 2.15.0
#
# For each it fetches torch's wheel (half a gigabyte) for this Python, keeps its headers in build/headers, and lets g++
# look at the C++ files and nvcc compile the CUDA files for one architecture, unoptimized, to nowhere. PYTHON names
# another interpreter, CUDA_HOME the toolkit (without one: g++ alone, on the CPU files), MAX_JOBS how many at a time.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
CXX=${CXX:-g++}
JOBS=${MAX_JOBS:-$(nproc)}
work=build/headers
[[ $# -gt 0 ]] || {
  sed -n '2,8s/^# \{0,1\}//p' "$0"
  exit 2
}

# pip's own settings are left aside: a constraint there may rule out the very version.
fetch() {
  local version=$1 folder=$work/$1
  [[ -e $folder/torch/version.py ]] && return
  mkdir -p "$folder"
  PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT='' "$PYTHON" -m pip download --quiet --no-deps --dest "$folder" "torch==$version"
  "$PYTHON" - "$folder" <<'END'
import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
for wheel in folder.glob("torch-*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.startswith("torch/include/")])
        archive.extract("torch/version.py", folder)  # last: from here on all is there
    wheel.unlink()
END
}

compile_one() {
  local file=$1
  case $file in
    *.cu) "$CUDA_HOME/bin/nvcc" "${FLAGS[@]}" -ptx -arch=compute_90 --expt-relaxed-constexpr -o /dev/null "$file" ;;
    *) "$CXX" "${FLAGS[@]}" -fsyntax-only -Wall -Wextra -fopenmp "$file" ;;
  esac || {
    echo "$file: does not compile"
    return 1
  }
}

sources=(csrc/*.cpp csrc/cpu/*.cpp)
cuda=()
if [[ -n ${CUDA_HOME:-} ]]; then
  sources+=(csrc/cuda/*.cpp csrc/cuda/*.cu)
  cuda=(-DLIGHTNING_APEX_WITH_CUDA '-DLIGHTNING_APEX_CUDA_VERSION="0"' '-DLIGHTNING_APEX_CUDA_ARCHS="9.0"'
    -isystem "$CUDA_HOME/include")
else
  echo "CUDA_HOME is not set: the CUDA files are left out"
fi

status=0
for version in "$@"; do
  fetch "$version"
  include=$work/$version/torch/include
  python_include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  # As setup.py: macros, torch's headers as the system's, and the language that torch builds extensions in.
  FLAGS=(-std=c++20 -DTORCH_EXTENSION_NAME=_C -DTORCH_API_INCLUDE_EXTENSION_H '-DLIGHTNING_APEX_VERSION="0"'
    "-DLIGHTNING_APEX_TORCH_VERSION=\"$version\"" "${cuda[@]}"
    -isystem "$include" -isystem "$include/torch/csrc/api/include" -isystem "$python_include")
  failed=0
  for file in "${sources[@]}"; do
    while (($(jobs -rp | wc -l) >= JOBS)); do wait -n || failed=$((failed + 1)); done
    compile_one "$file" &
  done
  while (($(jobs -rp | wc -l) > 0)); do wait -n || failed=$((failed + 1)); done
  echo "torch $version: ${#sources[@]} files, $failed failed"
  ((failed == 0)) || status=1
done
exit $status
