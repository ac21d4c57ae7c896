"""Messages: encode a patch in the fewest bytes, decode messages from untrusted senders (docs/wire-format.md)."""
