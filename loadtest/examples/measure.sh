#!/usr/bin/env bash
# usage: loadtest/examples/measure.sh PATH/TO/llama-server
# Measures everything that README's table shows: starts Headwater and llama.cpp's server on the same GGUF with
# the same threads, checks that neither burns CPU while it is not asked, loads one at a time in alternation, and
# writes agents.json and agents.html beside this file and the table in README.md. About REPEATS x 4 minutes on two
# cores, which must be quiet: threads that wait for a core that another program has make llama.cpp ten times slower.
# To try it: REPEATS=1 LEVELS=1 OUT=/tmp/x README=/tmp/x/README.md (a file with the two markers).
set -euo pipefail
llama=$(realpath "${1:?usage: $0 PATH/TO/llama-server}")
root=$(realpath "$(dirname "$0")/../..")
cd "$root"
export PYTHONPATH=$root
python=$root/.venv/bin/python
threads=${THREADS:-2} repeats=${REPEATS:-5} levels=${LEVELS:-1 4 8}
out=${OUT:-loadtest/examples} readme=${README:-README.md}
our_port=${PORT:-18790} their_port=$((${PORT:-18790} + 1))
logs=$(mktemp -d)
pids=()

finish() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait || true
    rm -rf "$logs"
}
trap finish EXIT

ready() { # URL LOG PID
    for _ in $(seq 300); do
        curl -sf "$1" >/dev/null && return
        kill -0 "$3" 2>/dev/null || break
        sleep 0.2
    done
    cat "$2" >&2
    exit 1
}

ticks() { awk '{print $14 + $15}' <<<"$(sed 's/.*) /x x /' "/proc/$1/stat")"; }

family_ticks() { # a server and its children
    local sum=0 pid
    for pid in "$1" $(pgrep -P "$1" || true); do sum=$((sum + $(ticks "$pid"))); done
    echo "$sum"
}

idle() { # NAME PID: less than 3 % of a core over three seconds
    local before after
    before=$(family_ticks "$2")
    sleep 3
    after=$(family_ticks "$2")
    if ((after - before > 9)); then
        echo "measure: $1 burns CPU while it is not asked anything: $((after - before)) ticks in 3 s" >&2
        exit 1
    fi
}

"$python" -m service serve --port $our_port --threads "$threads" >"$logs/ours" 2>&1 &
pids+=($!)
ready "http://127.0.0.1:$our_port/health/ready" "$logs/ours" $!
model=$(grep -om1 '/[^ ]*\.gguf' "$logs/ours")
THREADS=$threads loadtest/peers/llamacpp.sh "$llama" "$model" $their_port >"$logs/theirs" 2>&1 &
pids+=($!)
ready "http://127.0.0.1:$their_port/health" "$logs/theirs" $!
idle headwater "${pids[0]}"
idle llama.cpp "${pids[1]}"

version=$("$llama" --version 2>&1 | grep -om1 'version: [^ ]*' | cut -d' ' -f2)
note="Both on the same cores, $threads threads each, loaded one at a time, the same $(basename "$model"); llama-server "
note+="version $version, built natively, -c 32768 -np 8 -fa off"
mkdir -p "$out"
# shellcheck disable=SC2086  # the levels are words
"$python" -m loadtest compare --target headwater=http://127.0.0.1:$our_port \
    --target llama.cpp=http://127.0.0.1:$their_port --workload agents --concurrency $levels --repeats "$repeats" \
    --note "$note" --json "$logs/agents.json" --html "$logs/agents.html"
mv "$logs/agents.json" "$logs/agents.html" "$out"
"$python" -m loadtest readme "$out/agents.json" --write "$readme"
echo "measure: wrote $out/agents.json, $out/agents.html and the table in $readme"
