"""
How rotations and their gradients are computed quickly: scaling and squaring, closed forms, and the application to
queries and keys. `dispatch` chooses between these operations and the kernels. Imports from no other room. Whoever wants
to know what a rotation is need not enter: `rotation` states the equations and calls `exponentials` and `rotating`.
"""
