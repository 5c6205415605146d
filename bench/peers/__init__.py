"""`python -m bench peers`: our server beside the other servers that people choose, each served in its own usual way.

One module for each peer says what it needs, which files its service consists of, how it is started, and which page of
its documentation recommends that.
"""
