"""
Files and folders of checkpoints, their code and digests, checks of their weights, and the client of the Hub.

Start with `saved_model.py` for the files of a saved model, `saved_code.py` for the code beside it, and `client.py` for
requests to the Hub.
"""
