"""What kill_matrix.py is made of: a federation of real processes, places to stop them at, and what must hold after."""
