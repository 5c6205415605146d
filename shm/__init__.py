"""Tensors and where their bytes are: datatypes, regions, arenas, leases. Imports none of the other packages."""
