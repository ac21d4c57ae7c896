"""Data at a site: where it is, how it is read and checked; phantoms and partitions for the simulator."""
