"""The loop: scheduling, execution, models, weights and text, in a process of its own.

`service` may import `engine.api`, `engine.types` and `engine.text`, nothing else.
"""
