"""Evidence of a run: its facts, and the annex for an impact assessment that states them."""
