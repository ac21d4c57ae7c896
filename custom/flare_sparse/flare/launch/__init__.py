"""Starting a job: in the simulator, in POC mode, or at a running federation."""
