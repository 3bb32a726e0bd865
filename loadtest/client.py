"""One streamed chat completion, measured."""

import json
import time
from dataclasses import dataclass, field

import httpx


@dataclass(slots=True)
class Sample:
    """What one request showed; times in seconds, `gap_s` between pieces of text after the first.

    `error` is None for a stream that ended with a finish reason; a stream that just stops is an
    error, although client libraries take it for an end.
    """

    agent: int
    turn: int
    start_s: float
    ttft_s: float = 0.0
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


async def stream_chat(
    http: httpx.AsyncClient, url: str, body: dict[str, object], agent: int, turn: int
) -> Sample:
    """Send one chat completion and read its stream to the end. Never raises for a bad server."""
    sample = Sample(agent, turn, time.perf_counter())
    try:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                sample.error = f"HTTP {response.status_code}: {text[:200]}"
            else:
                await _read_stream(response, sample)
    except (httpx.HTTPError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.end_s = time.perf_counter()
    return sample


async def _read_stream(response: httpx.Response, sample: Sample) -> None:
    last_s = 0.0
    finished = False
    async for line in response.aiter_lines():
        if not line.startswith("data:") or line == "data: [DONE]":
            continue
        chunk = json.loads(line[5:])
        if chunk.get("error"):
            sample.error = str(chunk["error"].get("message"))
            return
        if usage := chunk.get("usage"):
            sample.prompt_tokens = usage["prompt_tokens"]
            sample.output_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            sample.cached_tokens = details.get("cached_tokens") or 0
        for choice in chunk.get("choices") or ():
            finished = finished or choice.get("finish_reason") is not None
            if piece := choice["delta"].get("content"):
                now_s = time.perf_counter()
                if sample.text:
                    sample.gaps_s.append(now_s - last_s)
                else:
                    sample.ttft_s = now_s - sample.start_s
                sample.text += piece
                last_s = now_s
    if not finished:
        sample.error = "the stream ended without a finish reason"
