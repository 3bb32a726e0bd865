"""The test engine: given tokens in given groups with given delays, behind the same interface."""

from engine.core import Core
from engine.scripted.core import ScriptedCore
from engine.scripted.script import (
    Script,
    ScriptFile,
    ScriptStep,
    byte_token,
    in_order,
    read_script_file,
    text_script,
)
from engine.types import EngineConfig

__all__ = [
    "Script",
    "ScriptFile",
    "ScriptStep",
    "ScriptedCore",
    "build_scripted_core",
    "byte_token",
    "in_order",
    "read_script_file",
    "text_script",
]


def build_scripted_core(config: EngineConfig) -> Core:
    """The core of the backend "scripted": `config.model` is a JSON file (`ScriptFile`), or empty
    for the built-in sentence. Raises EngineError for a file that cannot be played."""
    file = read_script_file(config.model)
    return ScriptedCore(file.script_for(), info=file.info(config.page_size), step_s=file.step_s)
