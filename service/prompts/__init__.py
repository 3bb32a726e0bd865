"""Conversations to token ids: chat template, tool section, limits."""

from service.prompts.renderer import PromptRenderer, RenderedPrompt

__all__ = ["PromptRenderer", "RenderedPrompt"]
