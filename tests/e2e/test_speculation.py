"""Predicted outputs over the real SDK, and what is told of drafts."""

from typing import Any

import openai

from tests.e2e.conftest import Server

OTHER = "\n".join(
    f"The {n} ship came home at dusk, and nobody sang." for n in ("old", "red", "last") * 3
)
ASKED: Any = {
    "model": "default",
    "messages": [{"role": "user", "content": "Write six functions that scale a value."}],
    "temperature": 0,
    "max_tokens": 60,
}


def counted(server: Server, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    (line,) = [each for each in lines if each.startswith(f"vllm:spec_decode_num_{name}_total{{")]
    return float(line.split()[1])


def test_a_prediction_is_used_and_accounted_for(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as sdk:
        plain = sdk.chat.completions.create(**ASKED)
        said = plain.choices[0].message.content
        assert said
        before = counted(server, "accepted_tokens")
        right = sdk.chat.completions.create(
            **ASKED, prediction={"type": "content", "content": said}
        )
        assert counted(server, "accepted_tokens") > before + 20
        assert counted(server, "draft_tokens") >= counted(server, "accepted_tokens")
        assert counted(server, "drafts") > 0
        parts: Any = [{"type": "text", "text": part} for part in OTHER.splitlines(keepends=True)]
        wrong = sdk.chat.completions.create(
            **ASKED, prediction={"type": "content", "content": parts}
        )
    assert plain.choices == right.choices == wrong.choices
    details = [
        each.usage and each.usage.completion_tokens_details for each in (plain, right, wrong)
    ]
    accepted = [each.accepted_prediction_tokens if each else None for each in details]
    rejected = [each.rejected_prediction_tokens if each else None for each in details]
    assert accepted[0] == rejected[0] == 0
    assert accepted[1] is not None and rejected[1] is not None
    assert accepted[1] > 40 and rejected[1] < 20
    assert accepted[2] is not None and rejected[2] is not None
    assert accepted[2] < 5 < 60 < rejected[2]


def test_a_prediction_that_is_no_text_is_refused(server: Server) -> None:
    for prediction, param in (
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "contents", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ("text", "prediction"),
    ):
        answer = server.http.post("/v1/chat/completions", json={**ASKED, "prediction": prediction})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
