"""The FLARE shell: the only place that imports nvflare; no mathematics here.

A site's IT allow-lists the prefix ``flare_sparse.flare.``: every class in it is safe to build with hostile arguments
(no import strings, no paths, no pickles). See docs/simulator.md.
"""
