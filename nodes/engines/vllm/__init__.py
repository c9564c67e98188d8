"""vLLM as an engine of ours: launched or attached to, driven over HTTP, its KV moved by a connector loaded inside it.

Empty on purpose: vLLM's processes import the connector from here and need nothing else of ours.
"""
