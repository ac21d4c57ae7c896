"""Checkpoints: values packed without pickle, written so that a reader finds either the old file or the new one."""
