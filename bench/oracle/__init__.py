"""The same requests to our server and to a real Triton, and the differences between the responses."""
