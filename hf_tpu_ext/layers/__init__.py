"""Parts of a model as compiled programs want them: attention, rope, the head, layers as a loop, adapters, random numbers."""
