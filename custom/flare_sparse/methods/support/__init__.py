"""Parts that several methods share: configurations, abstract methods and functions."""
