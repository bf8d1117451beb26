"""Text from a model: a program for prompts, and one for the tokens after them."""

from .generator import Generated, Generator
from .text import TextRequest, generate


__all__ = ["Generated", "Generator", "TextRequest", "generate"]
