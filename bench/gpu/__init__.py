"""`python -m bench heavy`: what one heavy request does to the other clients of a server, and to its memory."""
