"""Data at a site: BIDS brains, tables, images, where they lie, and for the simulator phantoms and partitions."""
