"""Start a job: in the simulator, in POC mode, or in a running federation."""
