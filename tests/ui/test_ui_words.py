"""The catalogue: both languages say the same things with the same values, and no screen says anything outside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ui.words import LANGUAGES, choose, placeholders, words

UI = Path(__file__).parents[2] / "ui"
SCREENS = ("tui", "console")
CJK = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]")
PHRASE = re.compile(r"[A-Za-z]{2,}[^\n]*\s[^\n]*[A-Za-z]|[A-Za-z][^\n]*\s[^\n]*[A-Za-z]{2,}")
"""Letters, a space and letters: what people would read as words."""
CAPITALISED = re.compile(r"[A-Z][a-z]{2,}")
BESIDE = re.compile(r"\s[A-Za-z]{3,}|[A-Za-z]{3,}\s")
"""Words beside a value in an f-string."""
CODE_NAME = re.compile(r"(.*_)?(CSS|HTML|JS|SQL|MARKUP)|key")
KEY_ARGUMENTS = {"key", "name", "id", "classes", "group"}
"""Keyword arguments that identify something to the program."""
TAG = re.compile(r"<[^<>]*>?|^[^<>]*>")
"""HTML within a constant, also the rest of a tag whose value is put in between."""
STYLE_NAMES = re.compile(r"\s*[a-z0-9]+(-[a-z0-9]*)+(\s+[a-z0-9]+(-[a-z0-9]*)+)*\s*")
TERMS = re.compile(r"(TTFT|TPOT|ITL|XPYD|KV|GPU|SLO|Phaseplane|p50|p90|p99|\W)+")
"""Said the same in every language."""
LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
ALLOWED: dict[str, frozenset[str]] = {}
"""Constants that are no text, by file below ui/: names of widgets or of a protocol, for example."""
SAME_IN_BOTH = re.compile(
    r"[A-Z0-9 .{}/_%:+\u2192-]*|Phaseplane|tokens?|prefill|decode|[a-z ]*(TTFT|TPOT|XPYD|KV|p50|p90|p99).*"
)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_language_has_the_same_keys_and_placeholders(lang: str) -> None:
    english, other = words("en", {}), words(lang, {})
    assert other.lang == lang
    assert sorted(set(english.keys) ^ set(other.keys)) == []
    for key in english.keys:
        values = placeholders(english.raw(key))
        assert placeholders(other.raw(key)) == values, key
        assert other.say(key, **dict.fromkeys(values, "0")).strip(), f"{key} says nothing"


def test_chinese_is_chinese_and_english_is_not() -> None:
    english, chinese = words("en", {}), words("zh-Hant", {})
    assert [key for key in english.keys if CJK.search(english.raw(key))] == []
    left = [key for key in chinese.keys if not CJK.search(chinese.raw(key))]
    assert [key for key in left if not SAME_IN_BOTH.fullmatch(chinese.raw(key))] == [], "not translated"
    simplified = set("\u4f53\u8bf7\u5e94\u53d1\u56fe\u95f4\u65f6\u8bbe\u7ebf\u8fdb\u5bf9\u5173\u8282\u70b9\u961f\u9519")
    assert [key for key in chinese.keys if simplified & set(chinese.raw(key))] == []
    half_width = re.compile(r"[\u2e80-\u9fff][,:;!?(]|[,;!?)][\u2e80-\u9fff]")
    assert [key for key in chinese.keys if half_width.search(chinese.raw(key))] == [], "half-width punctuation"


@pytest.mark.parametrize(
    ("lang", "environ", "chosen"),
    [
        (None, {}, "en"), ("zh-Hant", {}, "zh-Hant"), ("en", {"PHASEPLANE_LANG": "zh-Hant"}, "en"),
        (None, {"PHASEPLANE_LANG": "zh-TW", "LANG": "en_US.UTF-8"}, "zh-Hant"),
        (None, {"LANG": "zh_TW.UTF-8"}, "zh-Hant"), (None, {"LC_ALL": "C", "LANG": "zh_TW"}, "en"),
        (None, {"LANG": "de_DE"}, "en"), (None, {"PHASEPLANE_LANG": "", "LANG": "zh_HK"}, "zh-Hant"),
    ],
)  # fmt: skip
def test_the_language_is_the_first_that_is_asked_for(lang: str | None, environ: dict[str, str], chosen: str) -> None:
    assert choose(lang, environ) == chosen == words(lang, environ).lang


def test_a_message_needs_its_key_and_its_values() -> None:
    english = words("en", {})
    assert english.say("action.type_id", id="n3") == "Type n3 to confirm"
    assert english.under("outcome")["timed_out"] == "timed out"
    assert english.has("outcome.ok")
    assert not english.has("outcome")
    with pytest.raises(KeyError, match=r"did you mean 'action.type_id'"):
        english.say("action.typ_id")
    with pytest.raises(KeyError, match="id"):
        english.say("action.type_id")


# --- no text outside it -------------------------------------------------------------------------------------------


def files() -> list[Path]:
    return sorted(file for folder in SCREENS for file in (UI / folder).rglob("*.py"))


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(UI)))
def test_no_screen_says_anything_outside_the_catalogue(file: Path) -> None:
    allowed = ALLOWED.get(str(file.relative_to(UI)), frozenset())
    found = [f"{file.name}:{line}: {text!r}" for line, text in texts(file.read_text()) if text not in allowed]
    assert found == [], "put it into ui/words in both languages, and say its key"


@pytest.mark.parametrize("key", ["tui", "console"])
def test_every_key_that_a_screen_names_exists(key: str) -> None:
    """Of calls say("..."), has("...") and under("...") with a literal."""
    english = words("en", {})
    missing = []
    for file in (UI / key).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            first = node.args[0]
            if node.func.attr != "say" or not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
                continue
            if not english.has(first.value):
                missing.append(f"{file.name}:{node.lineno}: {first.value}")
    assert missing == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('x.update("Nothing here")', ["Nothing here"]),
        ('button("Quit")', ["Quit"]),
        ('f"{n} requests left"', [" requests left"]),
        ('x = "\\u8acb\\u6c42"', ["\u8acb\u6c42"]),
        ('raise CliError("no such fleet here")', []),
        ("f\"<p class='a b'>{x}</p><b>two words</b>\"", ["</p><b>two words</b>"]),
        ('a = "pp-line pp-goodput", "TTFT p50", "--host {x} and", "<!doctype html>"', []),
        ('def f():\n    """What it does."""\n    return "goodput_per_s"', []),
        ('class A(Widget):\n    """What it is."""\n    DEFAULT_CSS = "Screen { layout: grid; }"', []),
        ('_log.info("the feed is %s", state)', []),
        ('raise ValueError("x must be above 0")', []),
        ('assert x, "never empty here"', []),
        ('say("overview.verdict.met", attainment="0")', []),
        ('st.button(say("a.b"), key="put away")', []),
        ('state["put away"] = "Put away"', ["Put away"]),
        ('f"{a:>8} {b}"', []),
        ('say("a.b") + " \\u00b7 "', []),
        ("x: Literal['Some words'] = y", []),
    ],
)
def test_what_counts_as_text(source: str, found: list[str]) -> None:
    assert [text for _, text in texts(source)] == found


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, constant) of everything in a module that people would read."""
    tree = ast.parse(source)
    in_fstrings = {id(part) for root in ast.walk(tree) if isinstance(root, ast.JoinedStr) for part in root.values}
    skipped = {id(node) for root in ast.walk(tree) for node in unread(root)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = TAG.sub(" ", node.value) if "<" in node.value or ">" in node.value else node.value
            if text.startswith(("--", "%")) or STYLE_NAMES.fullmatch(text) or TERMS.fullmatch(text):
                continue
            beside = id(node) in in_fstrings and BESIDE.search(text)
            if CJK.search(text) or PHRASE.search(text) or CAPITALISED.fullmatch(text) or beside:
                yield node.lineno, node.value


def unread(root: ast.AST) -> Iterator[ast.AST]:
    """Constants below `root` that nobody is shown."""
    parts: list[ast.AST] = []
    if isinstance(root, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        parts = [one for one in root.body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)]
    elif isinstance(root, ast.Subscript):
        parts = [root.slice]
    elif isinstance(root, ast.keyword):
        parts = [root.value] if root.arg in KEY_ARGUMENTS else []
    elif isinstance(root, ast.Assign) and any(CODE_NAME.fullmatch(name_of(one)) for one in root.targets):
        parts = [root.value]
    elif isinstance(root, ast.AnnAssign):
        named = CODE_NAME.fullmatch(name_of(root.target)) is not None
        parts = [root.annotation, *([root.value] if named and root.value is not None else [])]
    elif isinstance(root, ast.Call) and isinstance(root.func, ast.Attribute) and root.func.attr in LOG_CALLS:
        logger = name_of(root.func.value)
        parts = list(root.args) if logger in ("_log", "log", "logger") else []
    elif isinstance(root, ast.Raise) and isinstance(root.exc, ast.Call):
        parts = [root.exc]  # errors are sentences in English everywhere, as the API's are
    elif isinstance(root, ast.Assert) and root.msg is not None:
        parts = [root.msg]
    elif isinstance(root, ast.arg) and root.annotation is not None:
        parts = [root.annotation]
    for part in parts:
        yield from ast.walk(part)


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
