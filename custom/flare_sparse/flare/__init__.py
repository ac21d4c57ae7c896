"""The FLARE side of the package: the only folder that imports nvflare, and without any mathematics.

Jobs may name only the classes in ``flare/site/setup.py``. Each is safe to build with hostile arguments: none takes
an import string, a path or a pickle. See docs/simulator.md.
"""
