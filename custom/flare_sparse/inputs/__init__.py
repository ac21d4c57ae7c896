"""Statistics of input features and targets: scaling and harmonisation as layers of the network."""
