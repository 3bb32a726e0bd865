#!/usr/bin/env bash
# usage: sglang.sh VENV FOLDER [PORT] [more options of sglang.launch_server]
# VENV has PyPI's sglang[all]; FOLDER is what export.py wrote. Needs an NVIDIA GPU: PyPI has no build for CPUs.
# --mem-fraction-static bounds weights and KV pages to MEMORY of the GPU's memory (default 0.5).
set -euo pipefail
venv=$1 folder=$2 port=${3:-8203}
exec "$venv/bin/python" -m sglang.launch_server --model-path "$folder" --dtype float32 --context-length 8192 \
    --mem-fraction-static "${MEMORY:-0.5}" --host 127.0.0.1 --port "$port" "${@:4}"
