"""GGUF files as checkpoints: one family's names and settings, from llama.cpp's names for all."""
