"""
Files and folders of checkpoints, their digests, checks of their weights, and the client of the Hub.

It imports only `errors`, so every room except `models` and `kernels` may use it. Start with `saved_model.py` for the
files of a saved model and `client.py` for requests to the Hub.
"""
