"""Devices and processes: the mesh, joining, supervising and watching processes."""
