"""`python bench/gpu/check.py`: what a GPU and the server do on it."""
