"""Any OpenAI-compatible server, joined by its URL: it serves whole requests and keeps its KV to itself."""
