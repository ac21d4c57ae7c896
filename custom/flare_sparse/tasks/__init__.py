"""Learning problems: the interface, the built-in tasks, bundles, data sets and networks."""
