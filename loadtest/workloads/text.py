"""Text of a wanted length from a seed. No model and no tokenizer: a word is about one token."""

import json
import random
from typing import Any

# Short, common words: with the space before them each is one token in every usual vocabulary.
WORDS = (  # noqa: SIM905
    "time people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month right study book eye "
    "job word business issue side kind head house service friend father power hour game line end "
    "member law car city community name team minute idea body information back parent face level "
    "office door health person art war history party result change morning reason research girl "
    "moment air teacher force education foot boy age policy music market sense nation plan college "
    "interest death experience effect use class control field development role effort rate heart"
).split()

TOOL_OVERHEAD_TOKENS = 60


def words(num_tokens: int, *key: object) -> str:
    """About `num_tokens` tokens, the same for the same `key` on every machine; "" for none."""
    rng = random.Random("/".join(str(part) for part in key))
    return " ".join(rng.choices(WORDS, k=max(num_tokens, 0)))


def tool_spec(num_tokens: int, *key: object) -> dict[str, Any]:
    """A function's JSON schema of about `num_tokens` tokens."""
    rng = random.Random("/".join(str(part) for part in key))
    name = "_".join(rng.choices(WORDS, k=2))
    return {
        "name": name,
        "description": words(max(num_tokens - TOOL_OVERHEAD_TOKENS, 4), *key, "description"),
        "parameters": {
            "type": "object",
            "properties": {
                rng.choice(WORDS): {"type": "string"},
                rng.choice(WORDS): {"type": "integer", "minimum": 1, "maximum": 50},
            },
            "required": [],
        },
    }


def system_prompt(num_tokens: int, tools: list[dict[str, Any]], *key: object) -> str:
    """The shared start of an agent's prompts: a line that no other key has, then instructions,
    then the specs of its tools as JSON lines."""
    tag = random.Random("/".join(str(part) for part in key)).getrandbits(40)
    lines = [f"Fleet {tag:010x}. You call tools and answer briefly.", words(num_tokens - 20, *key)]
    return "\n".join(lines + [json.dumps(spec) for spec in tools])
