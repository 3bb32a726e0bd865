#!/usr/bin/env bash
# usage: llamacpp.sh LLAMA_SERVER MODEL.gguf [PORT] [more options of llama-server]
# Eight slots of 4,096 tokens; THREADS cores (default 2) for prefill and decode alike.
set -euo pipefail
server=$1 model=$2 port=${3:-8201}
threads=${THREADS:-2}
exec "$server" -m "$model" -t "$threads" -tb "$threads" -c 32768 -np 8 -fa off --host 127.0.0.1 --port "$port" "${@:4}"
