"""The KV cache: who holds which page rows (host, no tensors) and the page pools themselves (tensors)."""
