"""
What a rotation is and does: generators and R(p) = exp(Σ_a p_a A_a) (`exponential`), its application to queries and keys
(`rotation`), the bases in which generators commute (`bases`). Imports from
`fast`. Start reading at `rotation.PlaneRotation`, then `exponential.block_rotations`.
"""
