"""Filters, aggregators, executors and controllers of the methods, for any FLARE job (docs/components.md)."""
