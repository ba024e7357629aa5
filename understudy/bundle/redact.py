"""Removes secrets and prompts from a support bundle.

Pure. Environment values are kept by an allow-list, minus names that look like secrets, because no
list of secrets is complete. In text (logs, command lines) anything that looks like a secret or a
prompt is replaced by a marker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

NOT_KEPT = "(not kept)"

# Settings that explain a pod's behaviour. Of all others only the name is kept.
_KNOWN = re.compile(
    r"UNDERSTUDY_|ENGINE_|GMS_|LOCKSERVER_|LOG_|CUDA_|NVIDIA_|NCCL_|VLLM_|TORCH|PYTORCH_|OMP_|MKL_"
    r"|OPENBLAS_|MALLOC_|LD_|PYTHON|(PATH|HOME|TMPDIR|TZ|LANG|HOSTNAME|POD_NAME|NODE_NAME)$"
)
_SECRET_NAME = re.compile(
    r"(?i)token(?!s|iz)|(^|[_-])key|apikey|secret|passw|passphrase|(^|[_-])pwd|credential|auth|cookie|private|signature"
)

# A secret in text, by its name. Our own tokens are numbers and stay: they are needed for diagnosis.
# Every repetition is bounded: a log may hold a megabyte of anything.
_SECRETS = r"""(?: api[_-]?key | access[_-]?key | private[_-]?key | secret | passw(?:or)?d
    | passphrase | credentials? | signature )"""
_TOKEN = r"(?: token (?! s\b | iz | \w{0,64}_ids ) )"
_IS = r"""\\{0,8}["']? \s{0,8} [:=] \s{0,8}"""  # quotes of JSON in JSON are escaped
# A list, a quoted string (with plain or escaped quotes), or a word; its beginning is a group.
_VALUE = r"""(?: (\[) [^\]\n]{0,4096} | (?: bearer \s{1,8} )? (?:
    (") (?:[^"\\\n]|\\.){0,4096} | (') (?:[^'\\\n]|\\.){0,4096}
    | (\\{1,8}["']) (?:[^"'\\\n]|\\{1,8}[^"'\\\n]){0,4096}
    | [^\s"'\\,;}\]&]+ ) )"""
_NAMED_IN_TEXT = re.compile(
    rf"""(?ix)
    ( (?: {_SECRETS} | {_TOKEN} (?! [\w-]{{0,64}} {_IS} \d+\b) ) [\w-]{{0,64}} {_IS} )
    (?! (?: null | none | true | false ) \b | \( | ["']{{2}} )
    {_VALUE}
    """
)
# A flag and its value: behind a space, in a list behind a comma, or on the next line behind a dash.
_FLAG_IN_TEXT = re.compile(
    rf"""(?ix) ( (?<![\w-]) --? (?: [\w-]{{1,64}} [_-] )? (?: {_SECRETS} | {_TOKEN} | key ) ["']?
    (?: [ ]{{1,8}} | [ \t]{{0,64}} (?: , \s{{0,64}} | \n [ \t]{{0,64}} - [ \t]{{1,64}} ) ) ["']? )
    (?! - ) \S+"""
)
# Whole headers: everything after the scheme is secret.
_HEADER = re.compile(
    rf"(?ix) \b ( (?: proxy- )? authorization | (?: set- )? cookie ) ( {_IS} \[? \\{{0,8}}[\"']?"
    r"(?: (?:bearer|basic|digest|negotiate|token) \s{1,8} )? ) "
    r"""(?! null\b | none\b | true\b | false\b ) [^\s"'\\\]}][^"'\\\n\r]{0,4096}"""
)
_IN_URL = re.compile(r"""(?i)([?&](?:\w{1,32}[_-])?(?:sig|key|code|auth)=)(?!\(not)[^&\s"'\\]+""")
_SHAPED = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[a-z]-|AKIA|ASIA|AIza|eyJ)[\w.-]{12,}"
    r"""|(?<=://)[^/?\#\s"'<>\\]{1,512}(?=@)"""
    r"|(?<=PRIVATE\ KEY-----)(?:(?!-----)[\s\S]){1,16384}"
)
_BEARER = re.compile(r"(?i)\bbearer\s+[\w.~+/=-]{8,}")

# Names of a request's text in the logs of vLLM and others: the rest of the line is dropped.
_PROMPT = re.compile(
    r"""(?i)\b(prompts?|prompt_token_ids|messages|content|input_ids|text)"""
    r"""(\\{0,8}["']?\s*[:=]\s*)\\{0,8}["'\[{(].*"""
)


def environment(values: Mapping[str, str]) -> dict[str, str]:
    """The environment sorted by name; only known, harmless values are kept."""
    return {
        name: text(value) if _KNOWN.match(name) and not _SECRET_NAME.search(name) else NOT_KEPT
        for name, value in sorted(values.items())
    }


def text(value: str) -> str:
    """`value` without anything that looks like a secret or a prompt."""
    found = _PROMPT.sub(rf"\1\2{NOT_KEPT}", value)
    found = _HEADER.sub(rf"\1\2{NOT_KEPT}", found)
    found = _NAMED_IN_TEXT.sub(rf"\1\2\3\4\5{NOT_KEPT}", found)
    found = _FLAG_IN_TEXT.sub(rf"\1{NOT_KEPT}", found)
    found = _IN_URL.sub(rf"\1{NOT_KEPT}", found)
    found = _BEARER.sub(f"Bearer {NOT_KEPT}", found)
    return _SHAPED.sub(NOT_KEPT, found)
