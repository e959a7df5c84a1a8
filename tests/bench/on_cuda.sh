#!/usr/bin/env bash
# What a CUDA device computes, how fast and in how much memory, in one text file:
#     tests/bench/on_cuda.sh [FILE]          (on_cuda.txt here, unless FILE is named)
# It ends within five minutes. Without such a device it says so and exits with 3.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
file=${1:-on_cuda.txt}
python=${PYTHON:-python}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "on_cuda.sh: expected a CUDA device that torch sees, got none: nothing is measured" >&2
    exit 3
fi
cd "$here/../.." || exit 1
PYTHONPATH=$PWD timeout 290 "$python" tests/bench/on_cuda.py 2>&1 | tee "$OLDPWD/$file"
