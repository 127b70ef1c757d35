"""The encodings and models that run transformers' own common tests."""

ENCODINGS = {
    "none": {"position_encoding": "none"},
    "absolute": {"position_encoding": "absolute"},
    "axial_rope": {"position_encoding": "axial_rope"},
    "rope_mixed": {"position_encoding": "rope_mixed"},
    "liere_8": {"position_encoding": "liere", "block_size": 8},
    "liere_dense": {"position_encoding": "liere", "block_size": 24},
    "comrope_ap": {"position_encoding": "comrope_ap", "block_size": 4},
    "comrope_ld": {"position_encoding": "comrope_ld", "block_size": 8},
}


KINDS = ("image", "video", "backbone", "tokens")
