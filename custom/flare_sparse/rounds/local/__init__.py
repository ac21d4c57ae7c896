"""Local runs: a whole job in one process without FLARE, through the real wire."""
