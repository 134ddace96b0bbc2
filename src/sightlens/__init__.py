"""SightLens."""
