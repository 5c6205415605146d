"""A store that speaks what the server uses of S3's protocol, and that can misbehave. It checks no signatures."""
