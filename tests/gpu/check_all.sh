#!/usr/bin/env bash
# Every check of this folder on one GPU, side by side where no time is taken, with one line a check and the failures at the
# end. All groups take more than ten minutes on an H200 with 16 cores (not timed as one); some of them: alone, two, four, models, cp4, te4.
#
#   bash tests/gpu/check_all.sh FOLDER_FOR_LOGS [group...]
set -u
logs=${1:?give a folder for logs}
shift
wanted="${*:-alone two four models cp4 te4}"
mkdir -p "$logs"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4
port=29700

check() { # name, command...
    local name=$1 begin
    shift
    begin=$(date +%s)
    timeout 400 "$@" >"$logs/$name.log" 2>&1
    local code=$?
    echo "$([ $code = 0 ] && echo passed || echo FAILED) $name, $(($(date +%s) - begin)) s, exit status $code" | tee -a "$logs/summary"
}
ranks() { # name, number of ranks, script, arguments...
    local name=$1 number=$2
    shift 2
    check "$name" torchrun --no-python --nproc-per-node "$number" --master-port "$port" bash tests/gpu/one_gpu_ranks.sh "$@"
}
alone() { check "$1" python3 "${@:2}" & }
references() { # what several ranks are compared with
    [ -z "${referenced:-}" ] || return
    alone te_reference tests/gpu/te_backend.py reference
    alone cp_reference tests/gpu/context_parallel.py reference
    wait
    referenced=1
}
together() { port=$((port + 1)); ranks "$@" & }

: >"$logs/summary"
for group in $wanted; do
    case $group in
    alone)
        alone optimizer tests/gpu/optimizer.py
        alone kernels tests/gpu/kernels.py
        alone head_loss tests/gpu/head_loss.py
        alone products tests/gpu/products.py
        alone hopper_products tests/gpu/hopper_products.py
        alone narrow_products tests/gpu/narrow_products.py
        alone cross_entropy tests/gpu/cross_entropy.py
        alone te_operations tests/gpu/te_backend.py operations
        alone fp8_attention tests/gpu/fp8_attention.py
        alone cp_tiles tests/gpu/context_parallel.py
        ;;
    two)
        together grid2 2 tests/gpu/parity_grid.py
        together schedules 3 tests/gpu/schedules.py
        together optimizer_modes 2 tests/gpu/optimizer_modes.py
        alone memory tests/gpu/memory.py
        alone graphs tests/gpu/graphs.py
        alone checkpoint tests/gpu/checkpoint.py
        ;;
    four)
        together grid4 4 tests/gpu/parity_grid.py
        together grid8 8 tests/gpu/parity_grid.py
        together graphs2 2 tests/gpu/graphs.py
        ;;
    models)
        references
        together te2 2 tests/gpu/te_backend.py
        together cp2 2 tests/gpu/context_parallel.py
        alone te_models tests/gpu/te_backend.py
        ;;
    cp4)
        references
        together cp4 4 tests/gpu/context_parallel.py
        ;;
    te4)
        references
        together te4 4 tests/gpu/te_backend.py
        ;;
    *) echo "no group $group" ;;
    esac
    wait
done
grep -h FAILED "$logs"/*.log | sort -u | cut -c1-200
cat "$logs/summary"
! grep -q FAILED "$logs/summary"
