"""Names on the Hugging Face hub."""


def may_be_on_hub(name: str) -> bool:
    """Whether a name may be one on the hub, `owner/name` or `name`, and not only a path."""
    return not name.startswith((".", "/", "~")) and name.count("/") <= 1
