"""The server: clients of OpenAI's, Anthropic's and Ollama's interfaces share one engine."""
