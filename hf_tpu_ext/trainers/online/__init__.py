"""Training on completions that the model writes itself."""
