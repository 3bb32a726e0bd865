"""After vllm-project/vllm#18826, #2901 and #49445: a burst of ten times what the server takes is
refused at once beyond its bound, with a time to come back, and leaves nothing behind."""

import threading

import httpx

from tests.service.calls import CHAT, body
from tests.service.conftest import held, run_server

CAPACITY = 8


def test_a_burst_of_ten_times_the_capacity() -> None:
    answers: list[httpx.Response] = []
    with run_server(held("x" * 100), max_open=CAPACITY) as server:
        barrier = threading.Barrier(10 * CAPACITY)

        def post() -> None:
            with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
                http.get("/health")  # the connection stands
                barrier.wait(60)
                answers.append(http.post(CHAT, json=body()))

        threads = [threading.Thread(target=post) for _ in range(10 * CAPACITY)]
        for thread in threads:
            thread.start()
        # Nobody who was taken has ended: who is refused waits for nothing.
        while len(answers) < 9 * CAPACITY:
            threading.Event().wait(0.01)
        server.go_on()
        for thread in threads:
            thread.join()
        good = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 503]
        assert (len(good), len(refused)) == (CAPACITY, 9 * CAPACITY)
        for answer in refused:
            assert answer.json()["error"]["code"] == "server_is_overloaded"
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["retry-after-ms"]) > 0
        pool = server.wait_for_idle()
        assert (pool["referenced"], pool["num_requests"]) == (0, len(good))
        assert server.http.post(CHAT, json=body(max_tokens=1)).status_code == 200
