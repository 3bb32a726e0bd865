"""Deterministic conversations of agents that share one system prompt with tool specs."""

import json
import random
from dataclasses import dataclass

WORDS = (  # noqa: SIM905
    "amber anchor arrow basil beacon birch bridge cable canyon cedar cobalt copper delta engine "
    "falcon forest garden granite harbor island jacket kernel lantern maple needle oasis paddle "
    "quartz river saddle timber valley walnut window zephyr"
).split()

TASKS = (
    "The search returned three hits in {a}/{b}.py, the newest from build {n}. Which do you read?",
    "Latency of {a} rose from 180 to {n} ms while the queue of {b} grew. What do you check next?",
    "The command failed after {n} ms: connection to {a} refused by {b}. Summarise the failure.",
    "Service {a} logged {n} times that the quota of {b} is exceeded. Is it yesterday's incident?",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_agents` agents, each `num_turns` turns after a system prompt of about `prefix_words`."""

    num_agents: int
    num_turns: int
    prefix_words: int
    max_tokens: int
    seed: int

    def system_prompt(self) -> str:
        """The same text for the same seed; other seeds share nothing with it."""
        rng = random.Random(f"system-{self.seed}")
        lines = [f"You are agent fleet {self.seed:08x}. Use these tools and answer briefly."]
        num_words = 0
        while num_words < self.prefix_words:
            name = f"{rng.choice(WORDS)}_{rng.choice(WORDS)}"
            spec = {
                "name": name,
                "description": " ".join(rng.choices(WORDS, k=14)),
                "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
            }
            lines.append(json.dumps(spec))
            num_words += 30
        return "\n".join(lines)

    def user_turn(self, agent: int, turn: int) -> str:
        """What the agent's tool said, about forty tokens."""
        rng = random.Random(f"{self.seed}-{agent}-{turn}")
        task = TASKS[turn % len(TASKS)]
        words = rng.choices(WORDS, k=2)
        return task.format(a=words[0], b=words[1], n=rng.randrange(100, 9999))
