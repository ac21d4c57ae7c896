"""Measure what a finished run's model, and what its sites sent, reveal about the training examples."""
