"""Embedding tables in parallel: specs, plan, routing, lookup, exact sparse updates, and the dense oracle."""
