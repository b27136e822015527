#!/usr/bin/env bash
# Everything that needs a CUDA card: correctness, oracles, graph replay, then times. Meant to end within eight minutes.
#   tests/gpu/run.sh [OUT]      PYTHON=... names an interpreter that has torch with CUDA, triton and what this package needs
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${1:-bench-out}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0
pids=()

"$PYTHON" -c 'import torch, triton; assert torch.cuda.is_available(), "no CUDA card"
print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)' || exit 1

# Compiling takes most of the time, so the files run side by side.
names=(segment_attention ring_write rebase token_nll dispatch end_to_end)
for name in "${names[@]}"; do
  timeout 240 "$PYTHON" -m pytest -q -p no:cacheprovider "tests/kernels/test_$name.py" > "$OUT/$name.txt" 2>&1 &
  pids[${#pids[@]}]=$!
done
timeout 240 "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu tests/gpu > "$OUT/card.txt" 2>&1 &
names+=(card)
pids[${#pids[@]}]=$!
for i in "${!names[@]}"; do
  wait "${pids[$i]}"
  status=$?
  echo "== ${names[$i]}: $([ $status = 124 ] && echo "not done within 240 seconds" || tail -n 1 "$OUT/${names[$i]}.txt")"
  [ $status = 0 ] || { failed=1; tail -n 40 "$OUT/${names[$i]}.txt"; }
done

echo "== times"
timeout 200 "$PYTHON" tests/bench/ops.py --skip-tests --out "$OUT/ops.jsonl" 2>&1 | tee "$OUT/ops.txt"
[ "${PIPESTATUS[0]}" = 0 ] || failed=1
exit "$failed"
