"""What a model's position encoding has learned, where it looks and what it costs."""
