"""Configuration: files and overrides become one validated value; a run is assembled from it."""
