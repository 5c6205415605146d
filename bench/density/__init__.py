"""`python -m bench density`: what many models cost: time until they are ready, memory, requests per second."""
