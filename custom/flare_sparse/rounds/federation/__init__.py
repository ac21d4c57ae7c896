"""The rounds of a run. Local runs and FLARE's controller both use this loop."""
