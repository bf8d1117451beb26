"""Shows docstrings in Hugging Face form, which mkdocstrings takes for plain Markdown."""

import re


_IN_PROSE = re.compile(r"\[<code>~?(?:\w+\.)*(\w+)</code>\]")
_TYPE = re.compile(r"<code>[^<]*`[^<]*</code>")
_IN_TYPE = re.compile(r"\[`~?(?:\w+\.)*(\w+)`\]")


def on_page_content(html: str, **kwargs) -> str:
    """
    Shorten references to classes to their last name, and take the markup out of the types of arguments.

    Args:
        html (`str`):
            A page.
        **kwargs:
            What else MkDocs passes.

    Returns:
        `str`: The page to show.
    """
    html = _IN_PROSE.sub(r"<code>\1</code>", html)
    return _TYPE.sub(lambda match: _IN_TYPE.sub(r"\1", match[0]).replace("`", "").replace("*", ""), html)
