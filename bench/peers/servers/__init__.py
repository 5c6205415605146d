"""One module for each peer: what it needs, its files, how it is started, and where that is documented."""
