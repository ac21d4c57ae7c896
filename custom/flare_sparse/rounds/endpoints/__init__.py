"""Both ends of the wire: the state of each end, the encoding of its messages and the checks of received ones."""
