"""`headwater plan MODEL`: what a model needs and how fast it can be, from its header alone.

MODEL is a GGUF file (its header is enough), a Hugging Face folder, or its config.json. No weights
are read, and nothing is measured: bandwidth and operations per second are given.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.models.headers import ModelHeader, read_header
from engine.text.missing_model import missing_model
from engine.weights.checkpoint_file import CheckpointError
from kernels.contract import KVDType, KVLayout
from kernels.roofline import StepCosts, kv_token_bytes

KV_DTYPES: Final = {
    **{dtype.value: dtype for dtype in KVDType},
    "fp32": KVDType.F32,
    "fp16": KVDType.F16,
    "fp8": KVDType.E4M3,
    "int8": KVDType.I8,
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)", re.IGNORECASE)
_POWERS: Final = " kmgtp"


class PlanError(ValueError):
    """A number or a path that cannot be; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for. The rates are 0 where they are not given."""

    memory_bytes: int
    context: int
    batch: int
    kv_dtype: KVDType
    bytes_per_s: float = 0.0
    flops_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from a model and a wish. `scale_bytes` of `token_bytes` are the scales of an
    8-bit KV; times are None without rates."""

    weight_bytes: int
    token_bytes: int
    scale_bytes: int
    request_bytes: int
    batch_bytes: int
    fitting_batch: int
    decode_s: float | None
    prefill_s: float | None


def make_plan(header: ModelHeader, wish: Wish) -> Plan:
    """Raises PlanError for a context beyond the model's, or numbers below 1."""
    spec = header.spec
    for name in ("memory_bytes", "context", "batch"):
        if getattr(wish, name) < 1:
            raise PlanError(f"--{name.removesuffix('_bytes')} must be at least 1.")
    if wish.context > spec.max_context:
        raise PlanError(
            f"--context {wish.context}: the model was made for {spec.max_context} tokens; ask for "
            "at most that."
        )
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype=wish.kv_dtype)
    token_bytes = kv_token_bytes(layout)
    plain = 2 * wish.kv_dtype.itemsize * spec.num_layers * spec.num_kv_heads * spec.head_dim
    request_bytes = token_bytes * wish.context
    left = wish.memory_bytes - header.weights.total
    costs = StepCosts(spec, header.weights, layout)

    def seconds(sequences: Sequence[tuple[int, int]], num_rows: int) -> float | None:
        if not (wish.bytes_per_s and wish.flops_per_s):
            return None
        flops, memory = costs.cost(sequences, num_rows)
        return max(memory / wish.bytes_per_s, flops / wish.flops_per_s)

    return Plan(
        weight_bytes=header.weights.total,
        token_bytes=token_bytes,
        scale_bytes=token_bytes - plain,
        request_bytes=request_bytes,
        batch_bytes=request_bytes * wish.batch,
        fitting_batch=max(0, left // request_bytes),
        decode_s=seconds([(1, wish.context)] * wish.batch, wish.batch),
        prefill_s=seconds([(wish.context, wish.context)], 1),
    )


def describe(header: ModelHeader, wish: Wish, plan: Plan) -> str:
    """The plan as a table."""
    spec = header.spec
    fits = f"{plan.fitting_batch} requests of {wish.context} tokens"
    if plan.weight_bytes > wish.memory_bytes:
        fits = "none: the weights alone are larger"
    scales = f", {plan.scale_bytes} of them scales" if plan.scale_bytes else ""
    lines = [
        ("model", f"{spec.family}, {spec.num_layers} layers, {spec.num_kv_heads} KV heads"),
        ("weights", f"{_gib(plan.weight_bytes)} ({header.storage})"),
        ("KV per token", f"{plan.token_bytes} bytes in {wish.kv_dtype.value}{scales}"),
        ("KV per request", f"{_gib(plan.request_bytes)} at {wish.context} tokens"),
        (f"KV of a batch of {wish.batch}", _gib(plan.batch_bytes)),
        (f"fits in {_gib(wish.memory_bytes)}", fits),
    ]
    if plan.decode_s is None or plan.prefill_s is None:
        lines.append(("times", "give --bandwidth and --flops, like 3.35TB and 990T"))
    else:
        rate = wish.batch / plan.decode_s
        decode = f"{_ms(plan.decode_s)} a step of {wish.batch}, {rate:.0f} tokens/s"
        lines.append(("decode, at best", decode))
        prefill = f"{_ms(plan.prefill_s)} for {wish.context} tokens"
        lines.append(("prefill, at best", prefill))
    width = max(len(name) for name, _ in lines) + 2
    return "".join(f"{name:<{width}}{value}\n" for name, value in lines)


def parse_size(option: str, text: str, *, binary: bool) -> float:
    """A number with k, M, G, T or P, and with "iB" or `binary` in steps of 1024. Raises
    PlanError."""
    match = _SIZE.fullmatch(text.strip().removesuffix("/s"))
    if match is None or not float(match[1]):
        raise PlanError(f"{option} {text!r} is no size; write it like 80GiB or 3.35TB.")
    if binary and not match[2]:
        raise PlanError(f"{option} {text!r}: say also the unit, like {text.strip()}GiB.")
    step = 1024 if match[3] or binary else 1000
    return float(match[1]) * float(step) ** _POWERS.index(match[2].lower() or " ")


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 with one sentence on standard error."""
    parser = argparse.ArgumentParser(
        prog="headwater plan",
        description="What a model needs and how fast it can be; no weights are read.",
    )
    add = parser.add_argument
    add("model", type=Path, help="GGUF file, Hugging Face folder, or config.json")
    add("--memory", default="80GiB", metavar="SIZE", help="of the device (default: %(default)s)")
    add("--context", type=int, default=0, metavar="TOKENS", help="of a request (default: all)")
    add("--batch", type=int, default=1, help="requests at a time (default: %(default)s)")
    add("--kv-dtype", default="f16", help=f"{', '.join(KV_DTYPES)} (default: %(default)s)")
    add("--bandwidth", default="", metavar="RATE", help="bytes per second, like 3.35TB")
    add("--flops", default="", metavar="RATE", help="operations per second, like 990T")
    given = parser.parse_args(arguments)
    try:
        if not given.model.exists():
            raise PlanError(missing_model(str(given.model), given.model))
        header = read_header(given.model)
        if given.kv_dtype.lower() not in KV_DTYPES:
            raise PlanError(f"--kv-dtype {given.kv_dtype!r}: choose {', '.join(KV_DTYPES)}.")
        wish = Wish(
            memory_bytes=int(parse_size("--memory", given.memory, binary=True)),
            context=given.context or header.spec.max_context,
            batch=given.batch,
            kv_dtype=KV_DTYPES[given.kv_dtype.lower()],
            bytes_per_s=_rate("--bandwidth", given.bandwidth),
            flops_per_s=_rate("--flops", given.flops),
        )
        sys.stdout.write(describe(header, wish, make_plan(header, wish)))
    except (PlanError, CheckpointError) as error:
        sys.stderr.write(f"headwater: {error}\n")
        return 2
    return 0


def _rate(option: str, text: str) -> float:
    return parse_size(option, text, binary=False) if text else 0.0


def _gib(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
