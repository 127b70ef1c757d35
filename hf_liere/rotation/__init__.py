"""
What a rotation is and does: generators and R(p) = exp(Σ_a p_a A_a) (`exponential`), its application to queries and keys
(`rotation`), and the bases in which generators commute (`bases`), in which weights may stand (`projections`). Start at
`rotation.PlaneRotation`, then read `exponential.block_rotations`.
"""
