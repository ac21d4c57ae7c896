"""One release for every number about people: sums over cells that the site declared before any job."""
