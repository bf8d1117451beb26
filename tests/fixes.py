"""Applies the fixes that messages name, and sees that what was refused is accepted with them."""

import ast
import re

import pytest
import yaml

from hf_tpu_ext.errors import UserError


_VALUE = r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\{[^}]*\}|-?[\w./\\-]*\w"
# `name=value`, or `Set name to value`; the name may be that of an environment variable.
_OPTION = re.compile(r"--([a-z][\w-]*)((?: (?!--|or |and )[^\s,;:]+)*)")
_ASSIGNMENT = re.compile(rf"`?\b(\w+)(?:=|: |`? to )({_VALUE})")


def refusal(check, settings) -> str:
    """What is said of `settings` (`dict`), which `check` refuses."""
    with pytest.raises(UserError) as error:
        check(**settings)
    return str(error.value)


def edits(settings: dict, message: str, fix: str) -> list[dict]:
    """
    Change settings as a message tells to.

    Args:
        settings (`dict`):
            The settings that the message is about.
        message (`str`):
            The message. "it" and "this" in its fix are the setting that it names first.
        fix (`str`):
            A part of the message, with `name=value` or `--name value` (several of one name are alternatives), "Set it to VALUE",
            "Allowed: A, B", a range `1...9`, "leave NAME out", or several of these.

    Returns:
        `list[dict]`: The changed settings, one for each alternative.
    """
    places = {name: re.search(rf"\b{name}\b", message) for name in settings}
    first = min((name for name in settings if places[name]), key=lambda name: places[name].start(), default=None)
    left_out = re.compile(r"[Ll]?eave (.+?) out\b|[Ll]?eave out (?:--)?([\w-]+)|(Unset it)")
    names = {word for groups in left_out.findall(fix) for word in re.findall(r"\w[\w-]*", " ".join(groups))}
    if names & {"it", "this", "Unset"}:
        names.add(first)
    fix = left_out.sub("", fix)
    alternatives: dict[str, list] = {}
    if listed := re.search(r"(?:Allowed|one of|[Aa]llowed are):? (?!\w+=)\[?([^.;\]]*)", fix):
        alternatives[first] = [_value(word) for word in listed.group(1).split(", ")]
    if span := re.search(r"(\d+)\.\.\.(\d+)", fix):
        alternatives[first] = [int(end) for end in span.groups()]
    for name, words in _OPTION.findall(fix):
        values = [_value(word) for word in words.removesuffix(".").split()]
        alternatives.setdefault(name, []).append(values if len(values) > 1 else values[0] if values else True)
    for name, value in _ASSIGNMENT.findall("" if listed or span else _OPTION.sub("", fix)):
        alternatives.setdefault(first if name == "it" else name, []).append(_value(value))
    kept = {name: value for name, value in settings.items() if name not in names}
    assert alternatives or kept != settings, f"no fix in: {message}"
    count = max(map(len, alternatives.values()), default=1)
    return [
        kept | {name: values[min(place, len(values) - 1)] for name, values in alternatives.items()}
        for place in range(count)
    ]


def assert_fixes(check, settings: dict, *fixes: str) -> None:
    """
    Check that settings are refused with a message that holds each of some fixes, and that each fix lifts the refusal.

    Args:
        check (`Callable`):
            Takes settings by name, and raises a [`UserError`] where they cannot work.
        settings (`dict`):
            What it refuses.
        fixes (`str`):
            Parts of the message, see [`edits`].
    """
    message = refusal(check, settings)
    for fix in fixes:
        assert fix in message, f"{fix!r} is not in: {message}"
        for edited in edits(settings, message, fix):
            check(**edited)


def _value(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return yaml.safe_load(text)
