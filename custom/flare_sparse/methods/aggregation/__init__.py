"""How the contributions of a round become one vector."""
