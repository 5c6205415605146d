"""Model repositories in the object stores of clouds: Amazon S3 and what is compatible, Google Cloud Storage, Azure.

The kernel asks a process of its own for everything (`process.py`), because the clients of the stores are large and may
hang. A model's files are copied into a folder of this machine when it is loaded (`copies.py`).
"""
