"""The FLARE shell: the only place that imports nvflare; no mathematics here.

A site's IT allow-lists the classes in it that a job may name (``flare/site/allow_list.py``): each is safe to build with
hostile arguments (no import strings, no paths, no pickles). See docs/simulator.md.
"""
