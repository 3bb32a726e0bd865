"""`headwater plan`: numbers that follow from a header, and one sentence for what cannot be."""

import json
import re
from pathlib import Path

import pytest

from engine.models.headers import read_header
from engine.models.loader import load_model
from engine.plan import PlanError, Wish, main, make_plan, parse_size
from engine.text.default_model import find_default_model
from kernels.contract import KVDType
from kernels.roofline import WeightBytes

LLAMA_3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_70B))
    return path


def test_llama_3_70b_in_bf16_takes_two_and_a_half_gib_at_8192_tokens(config: Path) -> None:
    wish = Wish(160 * 2**30, 8192, 4, KVDType.BF16, 3.35e12, 990e12)
    plan = make_plan(read_header(config), wish)
    assert plan.token_bytes == 2 * 2 * 80 * 8 * 128
    assert plan.request_bytes == 2.5 * 2**30
    assert plan.batch_bytes == 10 * 2**30
    assert plan.fitting_batch == (160 * 2**30 - plan.weight_bytes) // plan.request_bytes
    assert plan.decode_s is not None and plan.prefill_s is not None
    least_s = (plan.weight_bytes - 2 * 128256 * 8192 + plan.batch_bytes) / 3.35e12
    assert least_s < plan.decode_s < 1.01 * least_s
    linear_s = 2 * 8192 * 68.5e9 / 990e12
    assert linear_s < plan.prefill_s < 1.2 * linear_s


def test_the_folder_and_its_config_say_the_same(config: Path) -> None:
    assert read_header(config.parent) == read_header(config)


def test_eight_bits_halve_the_kv_and_tell_their_scales(config: Path) -> None:
    plan = make_plan(read_header(config), Wish(80 * 2**30, 8192, 32, KVDType.E4M3))
    assert plan.token_bytes - plan.scale_bytes == 2 * 80 * 8 * 128
    assert plan.scale_bytes == 2 * 80 * 8 * 4
    assert plan.fitting_batch == 0  # the weights alone are larger
    assert plan.decode_s is None


def test_the_default_models_header_says_what_its_weights_are(tmp_path: Path) -> None:
    path = find_default_model()
    assert path is not None
    header = read_header(path)
    model = load_model(path)
    whole = WeightBytes.of(model.weights)
    assert header.spec == model.spec
    assert header.weights.total == whole.total
    assert header.weights.by_op["head"] == whole.by_op["head"]
    cut = tmp_path / "header.gguf"
    cut.write_bytes(path.read_bytes()[: 4 << 20])
    assert read_header(cut) == header


def test_the_command_prints_the_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--memory", "80GiB", "--context", "8192", "--batch", "32", "--kv-dtype", "fp8"]
    rates = ["--bandwidth", "3.35TB/s", "--flops", "990T"]
    assert main([str(config), *arguments, *rates]) == 0
    told = capsys.readouterr().out
    for line in (
        r"weights +131\.4\d GiB \(bf16\)",
        r"KV per token +168960 bytes in e4m3, 5120 of them scales",
        r"KV per request +1\.29 GiB at 8192 tokens",
        r"fits in 80\.00 GiB +none",
        r"decode, at best .* tokens/s",
        r"prefill, at best .* for 8192 tokens",
    ):
        assert re.search(line, told), told


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere.gguf"],
        ["{config}", "--memory", "lots"],
        ["{config}", "--memory", "0"],
        ["{config}", "--context", "9000"],
        ["{config}", "--context", "-1"],
        ["{config}", "--batch", "0"],
        ["{config}", "--kv-dtype", "fp4"],
        ["{config}", "--bandwidth", "fast", "--flops", "1T"],
    ],
)
def test_what_cannot_be_is_one_sentence(
    config: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([each.format(config=config) for each in arguments]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.startswith("headwater: ") and told.err.count("\n") == 1


def test_a_model_that_is_not_here_is_told_as_serve_tells_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["org/Name-1B"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("headwater: org/Name-1B does not exist. Nothing is downloaded: name a")
    assert "`hf download org/Name-1B --local-dir Name-1B` makes one" in told


@pytest.mark.parametrize(
    "change", [{"torch_dtype": "int3"}, {"num_hidden_layers": "many"}, {"architectures": []}]
)
def test_a_broken_config_is_one_sentence(
    config: Path, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(json.dumps({**LLAMA_3_70B, **change}))
    assert main([str(config)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "binary", "number"),
    [
        ("80GiB", False, 80 * 2**30),
        ("80G", True, 80 * 2**30),
        ("3.35TB", False, 3.35e12),
        ("990T", False, 990e12),
        ("2TB/s", False, 2e12),
        ("100", False, 100),
    ],
)
def test_sizes(text: str, binary: bool, number: float) -> None:
    assert parse_size("--x", text, binary=binary) == pytest.approx(number)


def test_memory_needs_a_unit() -> None:
    with pytest.raises(PlanError, match="80GiB"):
        parse_size("--memory", "80", binary=True)


def test_no_size_is_refused() -> None:
    with pytest.raises(PlanError, match="--x"):
        parse_size("--x", "", binary=True)
