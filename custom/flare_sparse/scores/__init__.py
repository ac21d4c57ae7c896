"""What is worth keeping: one paper's score a file."""
