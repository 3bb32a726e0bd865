#!/usr/bin/env bash
# usage: openvino.sh VENV FOLDER [PORT] [more options of openvino_server.py]
# VENV and FOLDER are what setup.sh made, FOLDER with the model as int8 or fp32. THREADS cores (default 2), KV_GIB of
# KV cache (default 2).
set -euo pipefail
venv=$1 folder=$2 port=${3:-8204}
exec "$venv/bin/python" "$(dirname "$0")/openvino_server.py" "$folder" --threads "${THREADS:-2}" \
    --cache-gib "${KV_GIB:-2}" --port "$port" "${@:4}"
