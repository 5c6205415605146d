"""The names of vLLM that NVIDIA's backend imports, where vLLM 0.33 has them, with an engine whose tokens are words.

Engine arguments beside vLLM's own: `notes` is a file to which the engine appends what it is asked to end.
"""
