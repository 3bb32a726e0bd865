"""The one list of metrics: what `/metrics` and OTLP tell, and what dashboards may ask for.

Three families: `gen_ai.*` as OpenTelemetry's GenAI conventions name them, `vllm:*` as existing
boards query them, and `headwater.*` for what neither has.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """A counter never falls while the server runs; a gauge is what is so now."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` is OTLP's; `unit` is UCUM ("s", "By", "1", "{token}"); `bounds` are a histogram's
    upper bounds, each included in its bucket, empty where the engine gives them."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = "1"
    bounds: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """The name of the Prometheus family; counters' samples end in `_total` on top of it."""
        if self.name.startswith(("vllm:", "http_")):
            return self.name
        suffix = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return self.name.replace(".", "_") + suffix


def _one_two_five(most: int) -> tuple[float, ...]:
    return tuple(
        float(step * 10**power)
        for power in range(8)
        for step in (1, 2, 5)
        if step * 10**power <= most
    )


_TTFT: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
_TPOT: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LATENCY: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS: Final = _one_two_five(200_000)
_ITERATION: Final = (1.0, 8.0, *(float(2**power) for power in range(4, 15)))

_GEN_AI: Final = (
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "server.address",
    "server.port",
)
_MODEL: Final = ("model_name", "engine")


def _vllm(
    name: str,
    kind: Kind,
    help: str,
    labels: tuple[str, ...] = (),
    bounds: tuple[float, ...] = (),
) -> Metric:
    return Metric(f"vllm:{name}", kind, help, (*_MODEL, *labels), "1", bounds)


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    _H,
    "From a request's arrival to its end, refused ones included",
    (*_GEN_AI, "error.type"),
    "s",
    tuple(0.01 * 2**power for power in range(14)),
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    _H,
    "From a request's arrival to its first token, of requests that succeeded",
    _GEN_AI,
    "s",
    _TTFT,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    _H,
    "Mean time of a request's tokens after the first, of requests that succeeded",
    _GEN_AI,
    "s",
    _TPOT,
)
TOKEN_USAGE = Metric(
    "gen_ai.client.token.usage",
    _H,
    "Tokens of a request, by type",
    (*_GEN_AI, "gen_ai.token.type"),
    "{token}",
    tuple(float(4**power) for power in range(14)),
)

RUNNING = _vllm("num_requests_running", _G, "Requests that hold pages and compute")
WAITING = _vllm("num_requests_waiting", _G, "Requests in the queue")
WAITING_BY_REASON = _vllm(
    "num_requests_waiting_by_reason", _G, "Requests in the queue, by reason", ("reason",)
)
KV_USAGE = _vllm("kv_cache_usage_perc", _G, "Share of the KV pages that requests hold, 0 to 1")
CACHE_CONFIG = _vllm(
    "cache_config_info",
    _G,
    "What the KV pages are",
    ("block_size", "num_gpu_blocks", "enable_prefix_caching"),
)
PROMPT_TOKENS = _vllm("prompt_tokens", _C, "Prompt tokens of all requests")
GENERATION_TOKENS = _vllm("generation_tokens", _C, "Tokens of answers, forced ones included")
FORCED_TOKENS = Metric(
    "headwater.forced_tokens",
    _C,
    "Tokens of answers that took no step: their grammar left no choice",
    (),
    "{token}",
)
DRAFTS = _vllm("spec_decode_num_drafts", _C, "Times a request had drafts computed")
DRAFT_TOKENS = _vllm(
    "spec_decode_num_draft_tokens", _C, "Tokens computed because they might come next"
)
ACCEPTED_TOKENS = _vllm("spec_decode_num_accepted_tokens", _C, "Of these, tokens that came")
CACHED_TOKENS = _vllm("prompt_tokens_cached", _C, "Prompt tokens taken from the prefix cache")
TOKENS_BY_SOURCE = _vllm(
    "prompt_tokens_by_source", _C, "Prompt tokens of admitted requests, by source", ("source",)
)
CACHE_QUERIES = _vllm("prefix_cache_queries", _C, "Prompt tokens that the cache was asked for")
CACHE_HITS = _vllm("prefix_cache_hits", _C, "Prompt tokens that the cache had")
PREEMPTIONS = _vllm("num_preemptions", _C, "Times a request gave up its pages")
FINISHED = _vllm(
    "request_success", _C, "Requests that ended, by how they ended", ("finished_reason",)
)
REJECTED = _vllm(
    "admission_rejections", _C, "Requests refused before any token, by error", ("reason",)
)
VLLM_TTFT = _vllm(
    "time_to_first_token_seconds",
    _H,
    "From arrival to the first token",
    bounds=(*_TTFT, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
VLLM_ITL = _vllm(
    "inter_token_latency_seconds",
    _H,
    "Between two tokens of a request, as the engine made them; told when the request has ended",
    bounds=(0.001, 0.0025, 0.005, 0.0075, *_TPOT, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
VLLM_TPOT = _vllm(
    "request_time_per_output_token_seconds",
    _H,
    "Mean time of a request's tokens after the first",
    bounds=(*_TPOT, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
VLLM_E2E = _vllm("e2e_request_latency_seconds", _H, "From arrival to the end", bounds=_LATENCY)
VLLM_QUEUE = _vllm("request_queue_time_seconds", _H, "Time in the queue", bounds=_LATENCY)
VLLM_PREFILL = _vllm(
    "request_prefill_time_seconds", _H, "Time in which the prompt was computed", bounds=_LATENCY
)
VLLM_DECODE = _vllm(
    "request_decode_time_seconds", _H, "Time in which tokens were decoded", bounds=_LATENCY
)
VLLM_INFERENCE = _vllm(
    "request_inference_time_seconds", _H, "Prefill and decode together", bounds=_LATENCY
)
VLLM_PROMPT = _vllm("request_prompt_tokens", _H, "A request's prompt tokens", bounds=_TOKENS)
VLLM_GENERATION = _vllm(
    "request_generation_tokens", _H, "A request's sampled tokens", bounds=_TOKENS
)
VLLM_MAX_TOKENS = _vllm(
    "request_params_max_tokens", _H, "The max_tokens of requests", bounds=_TOKENS
)
VLLM_N = _vllm("request_params_n", _H, "The n of requests", bounds=(1.0, 2.0, 5.0, 10.0, 20.0))
VLLM_COMPUTED = _vllm(
    "request_prefill_kv_computed_tokens",
    _H,
    "A request's prompt tokens that were not cached",
    bounds=_TOKENS,
)
VLLM_REQUEST_PREEMPTIONS = _vllm(
    "request_num_preemptions", _H, "Preemptions of a request", bounds=(0.0, 1.0, 2.0, 5.0, 10.0)
)
ITERATION_TOKENS = _vllm("iteration_tokens_total", _H, "Tokens computed in a step", bounds=())

PAGES = Metric("headwater.pages", _G, "KV pages by state; each is in one", ("state",), "{page}")
EVICTED = Metric(
    "headwater.cache.evicted_pages", _C, "Cached pages dropped, by reason", ("reason",), "{page}"
)
DISK_PAGES = Metric("headwater.cache.disk_pages", _G, "Evicted pages kept on disk", (), "{page}")
RESTORED = Metric(
    "headwater.cache.restored_pages", _C, "Pages that came back from disk", (), "{page}"
)
DAMAGED = Metric(
    "headwater.cache.damaged_pages", _C, "Pages that disk did not keep whole", (), "{page}"
)
LEASES = Metric("headwater.cache.leases", _G, "Leases of prefixes", (), "{lease}")
LEASED_PAGES = Metric(
    "headwater.cache.leased_pages", _G, "Pages that leases hold, each once", (), "{page}"
)
LEASING_TENANTS = Metric(
    "headwater.cache.leasing_tenants", _G, "Tenants that hold a lease", (), "{tenant}"
)
AUDIT_DIFFERENCES = Metric(
    "headwater.cache.audit_differences", _C, "What idle audits found wrong", (), "{difference}"
)
QUARANTINED = Metric(
    "headwater.cache.quarantined_pages", _C, "Pages dropped by idle audits", (), "{page}"
)
PAUSED = Metric(
    "headwater.requests.paused", _G, "Running requests whose reader is slow", (), "{request}"
)
UNSENT_BYTES = Metric("headwater.unsent", _G, "Bytes that wait until clients take them", (), "By")
QUEUE_AGE = Metric(
    "headwater.queue.age", _G, "How long the first of those that wait has been there", (), "s"
)
QUEUE_TOKENS = Metric(
    "headwater.queue.tokens", _G, "Prompt tokens of those that wait", (), "{token}"
)
ITL_TARGET = Metric(
    "headwater.itl.target", _G, "The time between tokens that is kept; 0 for none", (), "s"
)
ITL_ACHIEVED = Metric(
    "headwater.itl.achieved", _G, "Steps of the last running streams", ("quantile",), "s"
)
TTFT_TARGET = Metric(
    "headwater.ttft.target", _G, "The time to the first token that is promised; 0 for none", (), "s"
)
STEP_ERROR = Metric(
    "headwater.step.prediction_error", _G, "Usual difference of a step from its prediction"
)
FLOOR_STEPS = Metric(
    "headwater.prefill.floor_steps",
    _C,
    "Steps that took longer than the target on purpose, for prompts that streams left no room",
    (),
    "{step}",
)
STEP = Metric("headwater.step.duration", _H, "From one step's end to the next one's", (), "s")
CHUNK = Metric("headwater.prefill.chunk", _H, "Tokens of the chunks chosen", (), "{token}")
STEPS = Metric("headwater.steps", _C, "Steps, by phase", ("phase",), "{step}")
STEP_WALL = Metric("headwater.step.wall", _C, "Time of steps, by phase", ("phase",), "s")
STEP_KERNEL = Metric(
    "headwater.step.kernel", _C, "Time in which the backend computed, by phase", ("phase",), "s"
)
STEP_FLOPS = Metric("headwater.step.flops", _C, "Operations of steps, by phase", ("phase",))
STEP_MEMORY = Metric(
    "headwater.step.memory", _C, "Bytes that steps had to move, by phase", ("phase",), "By"
)
INTENSITY = Metric(
    "headwater.roofline.intensity", _G, "Operations per byte of the last steps", ("phase",)
)
MBU = Metric(
    "headwater.roofline.mbu",
    _G,
    "Share of the memory bandwidth that the last steps used",
    ("phase",),
)
MFU = Metric(
    "headwater.roofline.mfu", _G, "Share of the operations that the last steps used", ("phase",)
)
HOST_SHARE = Metric(
    "headwater.roofline.host_share", _G, "Share of the last steps without a kernel", ("phase",)
)
VERDICT = Metric(
    "headwater.roofline.verdict", _G, "1 for what the last steps waited for", ("phase", "verdict")
)
PEAK_BANDWIDTH = Metric(
    "headwater.machine.bandwidth", _G, "Bytes per second that this machine reads", (), "By"
)
PEAK_FLOPS = Metric("headwater.machine.flops", _G, "Operations per second that this machine does")
ENGINE_UP = Metric("headwater.engine.up", _G, "1 while the engine takes requests")
DROPPED = Metric(
    "headwater.traces.dropped", _C, "Requests whose trace was not built, for want of time"
)
HTTP_REQUESTS = Metric(
    "http_requests", _C, "HTTP requests answered", ("handler", "method", "status")
)

METRICS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order they are told in."""
