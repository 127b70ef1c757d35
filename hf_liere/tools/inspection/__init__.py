"""
Inspection of models without labels: the learned position encoding, attention, cost and predictions.

Start with `analysis.py`, which combines the measurements of the other files. `command.py` writes them as a report.
"""
