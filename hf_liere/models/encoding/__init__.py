"""
Rotary encodings: which positions tokens have, and which rotations an encoding gives them.

Files here import each other, `rotation` and `saved_code`. Start with `positions.py` and `rotary_encoding.py`; then
`encodings.py` and `commuting_encodings.py` define the encodings, and `rotary_fields.py` documents their fields.
"""
