"""sglang#12693, #2238 and others: an abort at the wrong moment leaked pages until nothing was
admitted."""

import random

from tests.engine.tiny import PAGE, Driver, prompt, tiny_core


def test_a_thousand_aborts_at_any_moment_leave_nothing_referenced() -> None:
    rng = random.Random(18)
    run = Driver(tiny_core(num_pages=16, max_context=10 * PAGE, token_budget=32, max_running=4))
    shared = prompt(18, 50)
    for round_ in range(200):
        ids = [
            run.add(shared + prompt(rng.randint(1, 20), rng.randint(1, 60)), rng.randint(0, 9))
            for _ in range(5)
        ]
        rng.shuffle(ids)
        for request_id in ids:
            for _ in range(rng.randint(0, 2)):
                run.step()
            run.core.abort(request_id)
        run.run()
        pool = run.core.audit()
        assert pool.referenced == 0, f"after round {round_}"
        assert pool.free + pool.cached + pool.pinned == pool.total
    run.assert_idle()
