"""Tables larger than memory: a device buffer as a cache, with rows in host memory or on disk behind it."""
