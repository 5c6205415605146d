"""What attackers send: the rows of `python -m bench heavy`, and their bodies and messages."""
