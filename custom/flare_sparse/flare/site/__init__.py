"""What a hospital's IT does with a site's startup kit: let this package in, and look whether the site is ready."""
