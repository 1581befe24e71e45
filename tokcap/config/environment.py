"""`${oc.env:NAME}` in the text of a plain configuration, read as OmegaConf reads it."""

from __future__ import annotations

import os
import re

from ..errors import ConfigError

__all__ = ("resolve_text",)

_START = re.compile(r"\$\{\s*oc\.")
_WHOLE = re.compile(r"(\\?)(\$\{\s*oc\.env:([^{},]+)(?:,([^{}]*))?\})")


def resolve_text(text: str, path: str) -> str | None:
    r"""The text with every `${oc.env:NAME}` and `${oc.env:NAME,default}` replaced; other text stays as it is.

    `\${oc.env:NAME}` stands for itself without the backslash. None if the whole text is a reference whose default is
    `null`. path: where the text stands, for messages.

    Raises `ConfigError` that names a variable that isn't set, and never shows the text: it may hold a secret.
    """
    if len(_START.findall(text)) != len(_WHOLE.findall(text)):
        raise ConfigError(
            f"{path} has a reference that can't be read here: only ${{oc.env:NAME}} and ${{oc.env:NAME,default}} can, "
            "not nested; others need an OmegaConf configuration"
        )
    single = _WHOLE.fullmatch(text)
    if single is not None and not single[1]:
        return _value(single, path)
    return _WHOLE.sub(lambda match: match[2] if match[1] else str(_value(match, path)), text)


def _value(match: re.Match[str], path: str) -> str | None:
    name = _unquoted(match[3])
    if name in os.environ:
        return os.environ[name]
    if match[4] is None:
        raise ConfigError(
            f"{path} needs the environment variable {name}, which is not set; set it for this process, or give a "
            f"default: ${{oc.env:{name},default}}"
        )
    return None if match[4].strip() == "null" else _unquoted(match[4])


def _unquoted(text: str) -> str:
    text = text.strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text
