"""
Rotary encodings: which positions tokens have, and which rotations an encoding gives them.

Files here import each other, `rotation` and `saved_code`. Start with `positions.py` and `rotary_encoding.py`, which has
LieRE; `commuting_encodings.py` (ComRoPE), `string_encodings.py`, `spherical_rope.py` and `fixed_encodings.py` define
the other encodings, and `rotary_fields.py` documents their fields.
"""

from . import (  # noqa: F401 (they register)
    commuting_encodings,
    fixed_encodings,
    orientations,
    physical_spacing,
    spherical_rope,
    string_encodings,
)
