"""Parts of soak.py: a task whose training fails at random, runs of it, and their figures."""
