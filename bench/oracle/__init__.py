"""The same requests to our server and to a real Triton, and what differs in the answers."""
