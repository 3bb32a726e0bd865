"""Checkpoint files as memory-mapped tensors: GGUF files and Hugging Face safetensors folders."""
