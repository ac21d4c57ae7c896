"""What soak.py is made of: a task whose training fails at random, and the figures of a run."""
