"""The roofline of the real engine: what it counted is what was computed."""

from tests.e2e.conftest import Server
from tests.e2e.conversations import chat


def tokens_computed(server: Server) -> int:
    """With the drafts that did not come, which leave nothing behind."""
    pool = server.pool()
    rejected = pool["num_draft_tokens"] - pool["num_accepted_tokens"]
    return pool["num_computed_tokens"] + rejected


def test_work_adds_up_and_has_verdicts(server: Server) -> None:
    before = server.http.get("/v1/roofline").json()
    computed = tokens_computed(server)
    answer = chat(server, "You count rivers.", "Name some rivers, one after another.")
    told = server.http.get("/v1/roofline").raise_for_status().json()
    machine = told["machine"]
    assert machine["peak_bytes_per_s"] > 1e8 and machine["peak_flops_per_s"] > 1e9
    assert machine["ridge_intensity"] > 0
    phases = {each["kind"]: each for each in told["phases"]}
    assert {"prefill", "decode"} <= set(phases)
    old = {each["kind"]: each for each in before["phases"]}

    def new(kind: str, name: str) -> int:
        """What this request has added; the tests before it are others each time."""
        return int(phases[kind][name] - old.get(kind, {}).get(name, 0))

    assert sum(new(kind, "tokens") for kind in phases) == tokens_computed(server) - computed
    assert answer["usage"]["completion_tokens"] > 1
    for each in (*told["phases"], *told["recent"]):
        assert 0 < each["kernel_s"] <= each["wall_s"]
        assert each["flops"] > 0 and each["memory_bytes"] > 0
        assert 0 <= each["host_share"] < 1
        assert 0 < each["mbu"] <= 1 and 0 < each["mfu"] <= 1
        assert each["flops"] <= machine["peak_flops_per_s"] * each["kernel_s"] * 1.001
        assert each["verdict"] in ("compute-bound", "bandwidth-bound", "host-bound", "neither")
    prefill, decode = (
        new(kind, "flops") / new(kind, "memory_bytes") for kind in ("prefill", "decode")
    )
    assert prefill > 4 * decode
    assert 0 < len(told["recent"]) <= 128
