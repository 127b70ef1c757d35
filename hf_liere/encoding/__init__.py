"""
Rotary encodings: which positions tokens have, and which rotations an encoding gives them.

Start with `positions.py` and `rotary_encoding.py`, which has LieRE; `commuting_encodings.py` (ComRoPE),
`string_encodings.py` and `fixed_encodings.py` define the others, and `rotary_fields.py` documents their fields.
"""

from . import commuting_encodings, fixed_encodings, placement, shares, starts, string_encodings  # noqa: F401 (they register)
