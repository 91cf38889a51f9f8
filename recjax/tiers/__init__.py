"""Tables larger than memory: a device buffer as a cache, whose rows are in host memory or on disk."""
