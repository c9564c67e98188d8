"""The torch engine: Llama-family decoders over paged KV, on CPU and CUDA by the same code."""
