"""Everything that travels with a checkpoint: models, encodings, rotations and what patches them into others."""
