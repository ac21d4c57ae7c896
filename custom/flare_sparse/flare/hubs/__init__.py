"""Hubs in FLARE: a client that adds the values of other clients, and the link between them."""
