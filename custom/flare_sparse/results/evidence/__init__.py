"""Evidence of a run: facts, digests, a bill of materials, and an RO-Crate that holds them."""

NO_LICENSE = "No license is granted: ask the publisher of this crate."
