#!/usr/bin/env bash
# Everything that needs a CUDA card, in under eight minutes: correctness, oracles, graph replay, then times.
#   tests/gpu/run.sh [OUT]      PYTHON=... names an interpreter that has torch with CUDA, triton and this package's needs
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${1:-bench-out}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0

"$PYTHON" -c 'import torch, triton; assert torch.cuda.is_available(), "no CUDA card"; print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)' || exit 1

echo "== every op against float64, as far as 150 seconds go"
timeout 150 "$PYTHON" -m pytest -q -x -p no:cacheprovider tests/kernels -k "not ahead and not end_to_end" 2>&1 | tee "$OUT/ops-tests.txt"
status=${PIPESTATUS[0]}
[ "$status" = 124 ] && echo "stopped after 150 seconds; the tests above passed"
[ "$status" = 0 ] || [ "$status" = 124 ] || failed=1

echo "== whole models: oracles, graph replay"
timeout 120 "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu tests/kernels/test_end_to_end.py 2>&1 | tee "$OUT/gpu-tests.txt"
[ "${PIPESTATUS[0]}" = 0 ] || failed=1

echo "== times"
timeout 200 "$PYTHON" tests/bench/ops.py --skip-tests --out "$OUT/ops.jsonl" 2>&1 | tee "$OUT/ops.txt"
[ "${PIPESTATUS[0]}" = 0 ] || failed=1
exit "$failed"
