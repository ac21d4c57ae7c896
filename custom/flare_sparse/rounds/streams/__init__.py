"""Streams: groups of named arrays that two ends exchange in every round of any job, such as a model."""
