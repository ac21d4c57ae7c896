"""Parts of kill_matrix.py and pauses.py: a federation of real processes, hooks that stop them, checks afterwards."""
