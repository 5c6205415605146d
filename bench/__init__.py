"""Measurements: servers as processes, loads, reports. Not installed with the server."""
