"""
Publishing saved models on the Hub, pulling them, and rendering their model cards.

Start with `publishing.py`: `staging.py` prepares the folder that it publishes, and `cards.py` renders the card from
`facts.py`.
"""
