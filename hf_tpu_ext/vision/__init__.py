"""Images in static shapes: families of vision language models, what is computed of a batch's images on the host, and their forward pass."""
