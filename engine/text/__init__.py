"""Text and token ids: tokenizers, vocabularies, stop strings, UTF-8. No torch: the edge uses it."""

from engine.text.assets import TextAssets, TextError
from engine.text.encoder import Encoder
from engine.text.loading import load_text
from engine.text.stop_matcher import StopMatcher
from engine.text.utf8 import Utf8Assembler
from engine.text.vocabulary import Vocabulary

__all__ = [
    "Encoder",
    "StopMatcher",
    "TextAssets",
    "TextError",
    "Utf8Assembler",
    "Vocabulary",
    "load_text",
]
