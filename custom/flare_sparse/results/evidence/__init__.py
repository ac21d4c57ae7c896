"""Evidence of a run: facts, digests, a bill of materials, and an RO-Crate that holds them."""

ANNEX_SUFFIXES = (".md", ".docx", ".pdf")
"""Endings of files of an annex for an impact assessment."""
NO_LICENSE = "No license is granted: ask the publisher of this crate."
