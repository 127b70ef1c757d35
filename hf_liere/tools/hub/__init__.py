"""
Publishing saved models on the Hub, pulling them, and rendering their model cards.

It imports `auto`, `errors`, `models`, `patching` and `storage`; only files at the package's root import it. Start with
`publishing.py`: `staging.py` prepares the folder that it publishes, and `cards.py` renders the card from `facts.py`.
"""
