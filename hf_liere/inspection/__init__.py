"""Inspection of a model without labels: what its position encoding has learned, its attention, and its cost."""
