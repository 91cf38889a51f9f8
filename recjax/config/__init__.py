"""The config of a run: its parts, presets, and the recipe for small data."""
