"""GGUF files of llama.cpp as checkpoints."""
