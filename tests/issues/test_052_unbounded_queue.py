"""After vllm-project/vllm#18826, #2901 and #49445: a burst of ten times what the server takes is
refused at once beyond its bound, with a time to come back, and leaves nothing behind."""

import threading

import httpx

from engine.scripted import text_script
from tests.service.calls import CHAT, body
from tests.service.conftest import run_server

CAPACITY = 8


def test_a_burst_of_ten_times_the_capacity() -> None:
    answers: list[httpx.Response] = []
    with run_server(text_script("x" * 100, delay_s=0.01), max_open=CAPACITY) as server:
        barrier = threading.Barrier(10 * CAPACITY)

        def post() -> None:
            with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
                http.get("/health")  # the connection stands
                barrier.wait(60)
                answers.append(http.post(CHAT, json=body()))

        threads = [threading.Thread(target=post) for _ in range(10 * CAPACITY)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        good = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 503]
        assert len(good) + len(refused) == 10 * CAPACITY
        assert len(good) >= CAPACITY
        assert len(refused) >= 5 * CAPACITY
        for answer in refused:
            assert answer.json()["error"]["code"] == "server_is_overloaded"
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["retry-after-ms"]) > 0
        # Not timed: who is refused does not wait for anything, so it knows before the first ends.
        waited = sorted(answer.elapsed for answer in refused)
        assert waited[len(waited) // 2] < min(answer.elapsed for answer in good)
        pool = server.wait_for_idle()
        assert (pool["referenced"], pool["num_requests"]) == (0, len(good))
        assert server.http.post(CHAT, json=body()).status_code == 200
