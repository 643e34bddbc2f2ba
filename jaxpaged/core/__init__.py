"""Which tokens are computed next, and in which pages their keys and values live. Pure Python."""
