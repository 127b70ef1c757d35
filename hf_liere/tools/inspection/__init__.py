"""
Inspection of models without labels: the learned position encoding, attention, cost and predictions.

It imports `auto`, `errors`, `models`, `patching` and `storage`; only files at the package's root import it. Start with
`analysis.py`, which combines the measurements of the other files. `command.py` writes them as a report.
"""
