"""docs/sglang.md lists every place where the installed SGLang tests for DeepSeek-V4's names."""

import ast
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[1] / "docs" / "sglang.md"
SOURCE = Path(importlib.util.find_spec("sglang").origin).parent / "srt"
LITERAL = re.compile(r"Deep[sS]eekV4\w*|deepseek[_-]?v4\w*|is_deepseek_v4\w*")
PREDICATE = re.compile(r"\w*is_deepseek_v4\w*")
ROW = re.compile(
    r"\| `(?P<file>[\w/]+\.py)` \| `(?P<symbol>[\w.*<>]+)` \| (?P<places>\d+) \| [^|]+ \| (?P<here>[^|]+) \|"
)


def occurrences(source: str) -> Counter[str]:
    """Places of the names per enclosing function or class of a module's text.

    A place is a string that is one of the names, or a use of a predicate; prose and imports are none.
    """
    found: Counter[str] = Counter()

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*scope, child.name)
            name = getattr(child, "name", "") if inner != scope else ""
            match child:
                case ast.Constant(value=str(text)):
                    hit = LITERAL.fullmatch(text)
                case ast.Name(id=text) | ast.Attribute(attr=text):
                    hit = PREDICATE.fullmatch(text)
                case _:
                    hit = PREDICATE.fullmatch(name)
            found[".".join(inner) or "<module>"] += hit is not None
            visit(child, inner)

    visit(ast.parse(source), ())
    return +found


def in_source() -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(errors="replace")
        if re.search(r"deepseek[_-]?v4", text, re.IGNORECASE):
            for symbol, places in occurrences(text).items():
                found[path.relative_to(SOURCE).as_posix(), symbol] += places
    return found


def in_document() -> dict[tuple[str, str], re.Match[str]]:
    table = DOCUMENT.read_text().split("## Behaviour keyed on DeepSeek-V4 names")[1]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    matches = [ROW.fullmatch(line) for line in rows]
    assert all(matches), [line for line, match in zip(rows, matches, strict=True) if not match]
    listed = {(match["file"], match["symbol"]): match for match in matches if match}
    assert len(listed) == len(rows), "a place is listed twice"
    return listed


@pytest.fixture(scope="module")
def source() -> Counter[tuple[str, str]]:
    return in_source()


def test_every_place_that_tests_for_the_models_names_is_listed(source):
    listed = in_document()
    missing = [key for key in source if key not in listed and (key[0], "*") not in listed]
    assert not missing


def test_every_listed_place_exists_as_often_as_it_is_listed(source):
    for (file, symbol), row in in_document().items():
        places = sum(n for (f, s), n in source.items() if f == file and symbol in ("*", s))
        assert places == int(row["places"]), f"{file} {symbol}: {places} places in the source"


def test_every_listed_place_is_reproduced_refused_or_irrelevant_with_a_reason():
    for key, row in in_document().items():
        assert re.match(r"\*\*(reproduced|refused|irrelevant)\*\*: \S", row["here"]), key


@pytest.mark.parametrize(
    ("text", "symbols"),
    [
        ("def f(c):\n    return c.architectures[0] == 'DeepseekV4ForCausalLM'", {"f": 1}),
        ("class C:\n    def f(self):\n        return 'DeepseekV4' in self.arch", {"C.f": 1}),
        ("from m import is_deepseek_v4\nX = is_deepseek_v4(config)", {"<module>": 1}),
        ("if c.model_type in ('deepseek_v3', 'deepseek_v4'):\n    pass", {"<module>": 1}),
        ("def f(c):\n    return getattr(c, 'is_deepseek_v4_arch', False) or c.is_deepseek_v4_arch", {"f": 2}),
        ("def f():\n    'DeepSeek-V4 is served here.'\n    raise ValueError('DeepseekV4 needs a page')", {}),
    ],
)
def test_the_search_sees_literals_predicates_and_attributes_but_no_prose(text, symbols):
    assert occurrences(text) == symbols


def test_the_search_finds_the_predicate_that_everything_hangs_on(source):
    assert source["configs/model_config.py", "is_deepseek_v4"] >= 3
