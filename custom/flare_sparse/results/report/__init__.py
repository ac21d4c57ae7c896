"""Reports on finished runs: figures, an HTML page that works offline, and a model card."""
