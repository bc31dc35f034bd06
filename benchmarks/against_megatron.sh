#!/usr/bin/env bash
# The rows of docs/performance.md: each trains a shape through the Trainer and then runs the peer's script, in one call.
# About 85 seconds a row on an H200, 15 less where LOGS/products.json has the products' choices already. Main values are fp32,
# kept as the parameter and a 16-bit remainder (the same bits) where parameters have 16 bits.
#
#   bash benchmarks/against_megatron.sh PEER_SCRIPT FOLDER_FOR_LOGS [row...]
set -u
peer=${1:?give the path of the peer\'s script}
logs=${2:?give a folder for logs}
shift 2
mkdir -p "$logs"
declare -A rows=(
    [8b-bf16]="--shape llama-8b-8l --backend torch --remainders"
    [8b-delayed]="--shape llama-8b-8l --fp8 delayed --remainders"
    [8b-current]="--shape llama-8b-8l --fp8 current --remainders"
    [8b-best]="--shape llama-8b-8l --fp8 delayed --fp8-head --fp8-attention --fp8-params"
    [8b-fast]="--shape llama-8b-8l --fp8 delayed --fp8-head --fp8-attention --fp8-params --fp8-fast-gradients"
    [1b-bf16]="--shape llama-1b --seq 4096 --mbs 4 --gbs 16 --backend torch --te-cudnn --remainders"
)
[ $# -gt 0 ] || set -- "${!rows[@]}"
for row in "$@"; do
    [ -n "${rows[$row]:-}" ] || { echo "no row $row; there are ${!rows[*]}"; exit 2; }
done
for row in "$@"; do
    # shellcheck disable=SC2086
    timeout 200 python benchmarks/train_step.py ${rows[$row]} --tune "$logs/products.json" --profile --vs-megatron "$peer" \
        >"$logs/$row.log" 2>&1
    echo "$row: exit status $?"
    grep -E '^\{' "$logs/$row.log" | tail -n 3
done
