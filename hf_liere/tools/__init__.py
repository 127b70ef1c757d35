"""
Tools for checkpoints and models from outside: the command `hf-liere` (`cli.py`), conversion, export, inspection,
checks of rotary embeddings, model cards and the Hub. No room of the library imports it.
"""
