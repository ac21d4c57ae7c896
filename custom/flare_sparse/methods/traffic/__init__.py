"""What a run of each method asks of a site, one module per family of methods."""
