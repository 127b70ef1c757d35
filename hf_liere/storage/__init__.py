"""Where checkpoints lie: their names, files and folders, their digests, and the client of the Hub."""
