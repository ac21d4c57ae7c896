"""What every part is written in: errors, seeds, layouts, masks, exchanged values, checkpoints."""
