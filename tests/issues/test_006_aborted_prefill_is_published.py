"""sglang PR 28374: an aborted request put what it had not computed into the tree."""

import random

from tests.engine.tiny import PAGE, Driver, prompt, tiny_core


def test_after_an_abort_only_finished_steps_are_cached() -> None:
    rng = random.Random(6)
    cold = Driver(tiny_core()).answer(prompt(0, 300), 6)
    run = Driver(tiny_core(token_budget=40))
    for _ in range(100):
        run.core.flush()
        num_steps = rng.randint(0, 9)
        request_id = run.add(prompt(0, 300), 6)
        before = run.core.stats().num_computed_tokens
        for _ in range(num_steps):
            run.step()
        computed = run.core.stats().num_computed_tokens - before
        run.core.abort(request_id)
        run.run()
        again = run.answer(prompt(0, 300), 6)
        assert again.tokens == cold.tokens
        assert again.started is not None
        assert again.started.num_cached_tokens <= computed
        assert again.started.num_cached_tokens > computed - PAGE or computed >= 300
    run.assert_idle()
