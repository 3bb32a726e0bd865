"""Compiles all kernels for sm_80 and sm_90, without a GPU, and says what they use.

python -m kernels.triton.compile_check [--quick] [NAME ...]

Fails where a kernel keeps registers in memory (a stack, or LDL and STL instructions), needs more
shared memory than the device has, or is bound by memory and does not load 16 bytes at a time.
--quick compiles representatives alone; names select variants that contain one of them.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton.arguments import interpreted
from kernels.triton.compile_table import Variant, variants

SHARED_LIMIT: Final = {80: 163 * 1024, 90: 227 * 1024}
_TOOLS: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_WIDE: Final = re.compile(
    r"cp\.async\.cg\.shared\.global .*0x10"
    r"|ld\.global[\w.:]*\.(v4\.[bufs]32|v2\.[bufs]64|v8\.[bufs]16)"
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one variant needs on one architecture."""

    name: str
    capability: int
    registers: int
    stack_bytes: int
    local_accesses: int
    shared_bytes: int
    wide_loads: int
    matrix: str
    faults: tuple[str, ...]


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile one variant and read its resources from the binary."""
    names = variant.kernel.arg_names
    source = ASTSource(
        fn=variant.kernel,
        signature=dict(variant.signature),
        constexprs=dict(variant.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            "enable_fp_fusion": True,
        },
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    return _judged(
        variant,
        capability,
        registers=int(_number(r"REG:(\d+)", usage)),
        stack=int(_number(r"STACK:(\d+)", usage)),
        shared=int(compiled.metadata.shared),
        wide_loads=len(_WIDE.findall(compiled.asm["ptx"])),
        code=code,
    )


def _judged(
    variant: Variant,
    capability: int,
    *,
    registers: int,
    stack: int,
    shared: int,
    wide_loads: int,
    code: str,
) -> Compiled:
    local = len(re.findall(r"\b(?:STL|LDL)\b", code))
    faults = []
    if stack > variant.tolerated_stack_bytes or (local and not stack):
        faults.append(f"spills: a stack of {stack} bytes, {local} accesses")
    if shared > SHARED_LIMIT[capability]:
        faults.append(f"{shared} bytes of shared memory, {SHARED_LIMIT[capability]} there are")
    if variant.wide and not wide_loads:
        faults.append("no load of 16 bytes")
    kinds = [kind for kind in ("HGMMA", "HMMA") if re.search(rf"\b{kind}\b", code)]
    return Compiled(
        variant.name,
        capability,
        registers,
        stack,
        local,
        shared,
        wide_loads,
        kinds[0] if kinds else "-",
        tuple(faults),
    )


def compile_all(words: Sequence[str], *, quick: bool) -> Iterator[Compiled]:
    """All variants whose name contains one of the words (none: all), on both architectures."""
    for capability in SHARED_LIMIT:
        for variant in variants(capability):
            wanted = not words or any(word in variant.name for word in words)
            if wanted and (variant.shown or not quick):
                yield compile_variant(variant, capability)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.triton.compile_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="representatives alone")
    options = parser.parse_args()
    if interpreted():
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing")
    print(f"Triton {triton.__version__}")
    print(f"{'kernel':<58}{'sm':>3}{'regs':>6}{'stack':>7}{'shared':>8}{'16 B':>6}  matrix")
    count = bad = 0
    for one in compile_all(options.names, quick=options.quick):
        count += 1
        bad += bool(one.faults)
        print(
            f"{one.name:<58}{one.capability:>3}{one.registers:>6}{one.stack_bytes:>7}"
            f"{one.shared_bytes:>8}{one.wide_loads:>6}  {one.matrix:<6}{'; '.join(one.faults)}",
            flush=True,
        )
    print(f"{count} compiled, {bad} with faults")
    return 1 if bad or not count else 0


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern} in the tool's answer: {text[:200]}")
    return found.group(1)


if __name__ == "__main__":
    sys.exit(main())
