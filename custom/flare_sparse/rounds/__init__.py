"""The rounds of a run: both ends of the wire, the federation, runs in one process."""
