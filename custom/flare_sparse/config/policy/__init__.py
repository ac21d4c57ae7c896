"""A site's policy: what may leave the site, and a check of a job against it before the job runs. Free of FLARE."""
