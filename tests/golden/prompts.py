"""The 50 conversations of the golden vectors: (system prompt or "", user message)."""

import json
from typing import Final

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City and country"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}
_SEARCH = {
    "type": "function",
    "function": {
        "name": "search_files",
        "description": "Find lines in the repository that match a regular expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "pattern": {"type": "string"},
                "glob": {"type": "string", "default": "**/*.py"},
                "max_results": {"type": "integer", "minimum": 1, "maximum": 1000},
            },
            "required": ["pattern"],
            "additionalProperties": False,
        },
    },
}
_BOOKING = {
    "type": "function",
    "function": {
        "name": "book_table",
        "description": "Reserve a table in a restaurant.",
        "parameters": {
            "type": "object",
            "properties": {
                "restaurant_id": {"type": "integer"},
                "guests": {"type": "integer", "minimum": 1},
                "time": {"type": "string", "format": "date-time"},
            },
            "required": ["restaurant_id", "guests", "time"],
        },
    },
}
_AGENT = (
    "You are an agent. Answer with one JSON object that names the tool and its arguments, "
    "and nothing else. You may use these tools:\n"
)
_TOOLS = _AGENT + json.dumps([_WEATHER, _SEARCH, _BOOKING], indent=2)
_TOOLS_COMPACT = _AGENT + json.dumps([_SEARCH, _WEATHER], separators=(",", ":"))

_RIVER = """The river begins above the tree line, where the snow stays until June. For the first
ten kilometres it is hardly more than a brook that disappears between stones and comes out again
further down. Then three valleys join, and the water turns green and loud. The old mill at the
bridge was built in 1782; its wheel turned until 1951, when the power station was opened. Today
the building holds a museum with two rooms, one about the miller's work and one about the great
flood, which carried away eleven houses in a single night. Below the village the river becomes
slow. Herons stand in the shallow parts, and in autumn the fishermen come from the city with
their folding chairs. The mayor wants to build a path for bicycles along the bank. The farmers
are against it, because the cows drink there, and because they fear that the dogs of the visitors
will run free. A vote is to be held in spring."""

_CODE = '''class RingBuffer:
    """Holds the last `capacity` items."""

    def __init__(self, capacity: int) -> None:
        self.items = [None] * capacity
        self.start = 0
        self.size = 0

    def push(self, item):
        end = (self.start + self.size) % len(self.items)
        self.items[end] = item
        if self.size < len(self.items):
            self.size += 1
        else:
            self.start = (self.start + 1) % len(self.items)

    def __iter__(self):
        for i in range(self.size):
            yield self.items[(self.start + i) % len(self.items)]
'''

_TABLE = "\n".join(
    f"| {name} | {price:.2f} | {count} | {price * count:.2f} |"
    for name, price, count in [
        ("apples", 2.35, 12), ("bread", 3.1, 4), ("cheese", 11.9, 2), ("dates", 6.45, 3),
        ("eggs", 0.38, 30), ("flour", 1.15, 10), ("grapes", 4.2, 5), ("honey", 7.8, 1),
    ]
)  # fmt: skip

_LOG = "\n".join(
    f"2025-03-{day:02d}T0{day % 10}:17:4{day % 10}Z {level} worker-{day % 4} {text}"
    for day, (level, text) in enumerate(
        [
            ("INFO", "started, 4 threads"),
            ("INFO", "job 81723 accepted"),
            ("WARN", "queue length 912 above 800"),
            ("ERROR", "job 81723 failed: connection reset by peer (errno 104)"),
            ("INFO", "job 81723 retried, attempt 2 of 5"),
            ("ERROR", "disk /dev/sdb1 is 97% full"),
            ("INFO", "job 81723 finished in 18.42 s"),
        ],
        start=1,
    )
)

PROMPTS: Final[tuple[tuple[str, str], ...]] = (
    ("", "Hi"),
    ("", "What is gravity?"),
    ("", "Name three colours."),
    ("", "Write a haiku about autumn."),
    ("", "List the planets of the solar system in order."),
    ("", "What is 17 + 26?"),
    ("", "Solve for x: 3x - 7 = 20. Show each step."),
    ("", "A train travels 240 km in 3 hours. How fast is it, and how far does it go in 5 hours?"),
    ("", "Compute 12 34  56 as three separate numbers and add them: 12 + 34 + 56 = ?"),
    ("", "Write a Python function that returns the n-th Fibonacci number."),
    ("", "Write a function in JavaScript that reverses a string without using reverse()."),
    ("", "What does this do?\n\n```c\nint f(int n) { return n < 2 ? 1 : n * f(n - 1); }\n```"),
    ("", f"Explain this class and find a mistake, if there is one:\n\n{_CODE}"),
    ("You answer with code only.", f"Add a method `clear` to this class:\n\n{_CODE}"),
    ("", "Write an SQL query that counts orders per customer, largest first."),
    ("", "Turn this into JSON: name Ann, age 31, cities Rome and Oslo."),
    ("", 'Is this valid JSON? {"a": [1, 2, {"b": null}], "c": "x\\ny",}'),
    ("", "Wie heißt die Hauptstadt von Österreich?"),
    ("", "Erkläre mir in zwei Sätzen, warum der Himmel blau ist."),
    ("Du bist ein freundlicher Koch.", "Wie mache ich Kartoffelsuppe für vier Personen?"),
    ("", "Übersetze ins Englische: Die Straßenbahn fährt über die große Brücke."),
    ("", "Quelle est la capitale de la France ?"),
    ("", "Raconte une courte histoire d'un chat qui voulait apprendre à nager."),
    ("", "Traduis en anglais : « L'été dernier, nous avons goûté des crêpes près de la forêt. »"),
    ("", "¿Cuántos días tiene un año bisiesto y por qué?"),
    ("", "Tell a story with these emoji: 🐢 🚀 🌙 🧀"),
    ("", "What do 👩‍👩‍👧 and 🏳️‍🌈 mean? 😀😃😄"),
    ("", "How do you say hello in Japanese (こんにちは), Chinese (你好) and Russian (привет)?"),
    ("", "Give me ten ideas for a birthday party, as a numbered list."),
    ("", "Make a shopping list for pancakes, with amounts."),
    ("", "Compare cats and dogs in a table with three rows."),
    ("Answer in one word.", "Is water wet?"),
    ("You are a pirate.", "Tell me how to find north without a compass."),
    ("You are a strict teacher. Never praise.", "I wrote: 'He go to school yesterday.' Correct?"),
    ("", f"Summarise this text in one sentence:\n\n{_RIVER}"),
    ("", f"{_RIVER}\n\nWhen was the mill built, and why did its wheel stop?"),
    ("You write headlines for a newspaper.", f"Write three headlines for this:\n\n{_RIVER}"),
    ("", f"Rewrite this for a child of six:\n\n{_RIVER[:420]}"),
    ("", f"Which line is the most expensive, and what is the total?\n\n{_TABLE}"),
    ("You are a site reliability engineer.", f"What went wrong here?\n\n{_LOG}"),
    (_TOOLS, "What is the weather like in Lisbon, in celsius?"),
    (_TOOLS, "Find every place where `time.sleep` is called in the tests."),
    (_TOOLS, "Book a table for 4 at restaurant 118 on 2025-07-01 at 19:30."),
    (_TOOLS_COMPACT, "Show me lines that match ^def test_ in Python files, 20 at most."),
    (_TOOLS_COMPACT, "Is it colder in Oslo or in Quito right now?"),
    ("", "Write an email to my landlord: the heating is broken since Monday."),
    ("", "What is the difference between a list and a tuple in Python? Give an example of each."),
    ("", "Continue: Once upon a time, in a village at the foot of a mountain, there lived"),
    ("", "<b>Bold</b> &amp; <i>italic</i>: strip the HTML tags from this text."),
    ("", "   spaces   and\ttabs\t\tand\n\n\nnew lines   -- count the words, please   "),
)
