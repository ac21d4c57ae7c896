"""The methods, one module each, close to its paper; ``registry`` lists them."""
