"""What cannot work is refused before a model is loaded."""
