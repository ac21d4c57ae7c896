"""Evidence of a run: facts, digests, a bill of materials, and an RO-Crate that holds them."""
