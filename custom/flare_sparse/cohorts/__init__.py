"""What decides about the subjects of a site without a task: the split into parts, and subgroups."""
