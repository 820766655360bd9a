"""Zarr cells in an OCDBT database: written from host memory, read back cell by cell."""
