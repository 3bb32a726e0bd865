"""What a span says of drafts."""

from service.events import RequestRecord
from service.telemetry.span_attributes import request_attributes


def record(num_drafts: int, num_accepted: int) -> RequestRecord:
    return RequestRecord(
        "chat", "tiny", 0, num_draft_tokens=num_drafts, num_accepted_tokens=num_accepted
    )


def test_drafts_of_all_choices_are_told_and_none_where_there_were_none() -> None:
    told = request_attributes([record(7, 5), record(4, 0)])
    assert told["headwater.speculation.draft_tokens"] == 11
    assert told["headwater.speculation.accepted_tokens"] == 5
    assert not any("speculation" in name for name in request_attributes([record(0, 0)]))
