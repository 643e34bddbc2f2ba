"""Device arrays of a step, and the key to their names.

Arrays end in their axes, one capital letter an axis:
T tokens of a step (flat, padded), B sequences, R sampled rows, M pages per sequence, P pages in
the pool, S slots per page, L layers, D width, F FFN width, N query heads, K KV heads, G = N / K,
H head dim, V vocabulary, C context, X entries of a list.
"""
