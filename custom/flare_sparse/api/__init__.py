"""The Python API: a study runs in an environment and leaves a run."""
