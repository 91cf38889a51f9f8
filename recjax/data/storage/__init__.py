"""Prepared data on disk and on object storage: blocks, manifests, snapshots in run folders."""
