"""Embedding tables in parallel: specs, plan, routing, lookup and exact sparse updates."""
