"""Publishing to the Hub and pulling from it, and the cards of what is published."""
