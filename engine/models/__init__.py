"""Checkpoints as models: a `DecoderSpec` and `DecoderWeights` from a file's config and tensors."""

from engine.models.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
