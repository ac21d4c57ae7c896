"""Tools for a site's startup kit: allow the package's classes, install guards, refuse code, check readiness."""
