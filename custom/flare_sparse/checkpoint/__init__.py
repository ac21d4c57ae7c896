"""What must survive a crash: values packed without pickle, written so that a reader finds the old or the new."""
