"""Channel graphs of networks, and the smaller networks that remain when units or channels are removed."""
