"""How a page is written: its sentences, and those that are beside the rules of CONTRIBUTING.md.

``python -m tests.prose PAGE ...`` prints them; a file of Python is read as its docstrings and
comments.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

RELATIVE = re.compile(r"\b(?:that|which|what|who|whose)\b", re.I)
RATE = 1.8  # of these, in 100 words
LENGTH = 25  # words of a sentence, without what is in parentheses
TO_TOOLS = re.compile(r"#\s*(?:type|fmt|noqa|ruff|mypy)\b")
NO_SUBJECT = re.compile(r"[(*\"]*(?:What|Who|That|Of|Which)\b")


class Prose(NamedTuple):
    words: int
    relative: int  # of the words
    without_subject: list[str]
    long: list[str]

    @property
    def rate(self) -> float:
        return 100 * self.relative / max(self.words, 1)


def passages(page: str) -> list[tuple[str, str]]:
    """Paragraphs, items of lists, headings and cells of tables, and where each may be cut.

    A code span is one word, and blocks of code are left out.
    """
    text = re.sub(r"^```.*?^```$", "\n", page, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^> ?", "", text, flags=re.M)
    text = re.sub(r"^\s*(?:[-*+]|\d+\.)\s+", "\n", text, flags=re.M)
    text = re.sub(r"^(#+ .*)$", r"\n\1\n", text, flags=re.M)
    found = []
    for passage in re.split(r"\n\s*\n", re.sub(r"^\|[-| :]*\|$", "", text, flags=re.M)):
        rows = passage.strip().startswith("|")
        parts = re.split(r"\||\n", passage) if rows else [" ".join(passage.split())]
        found += [(p.strip("#>* "), ".!?:;" if rows else ".!?:") for p in parts]
    return [(text, ends) for text, ends in found if re.search("[A-Za-z]", text)]


def prose(page: str) -> Prose:
    words = relative = 0
    without_subject, long = [], []
    for passage, ends in passages(page):
        words += len(re.findall(r"[A-Za-z][\w'-]*", passage))
        relative += len(RELATIVE.findall(passage))
        without = re.sub(r"\([^()]*\)", "", passage)
        for sentence in re.split(rf"(?<=[{ends}])[*)\"]*\s+(?=[*(\"]*\w)", without):
            if NO_SUBJECT.match(sentence):
                without_subject.append(sentence)
            if len(re.findall(r"[A-Za-z][\w'-]*", sentence)) > LENGTH:
                long.append(sentence)
    return Prose(words, relative, without_subject, long)


def remarks(code: str) -> str:
    """The docstrings and comments of a Python file as a page, without examples of code."""
    found = [
        re.sub(r"::\n(?:\n| .*(?:\n|$))+", ":\n\n", ast.get_docstring(node) or "")
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    above = None  # the place of a comment's line, if the line has no code
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type != tokenize.COMMENT or TO_TOOLS.match(token.string):
            continue
        row, column = token.start
        text = token.string.lstrip("#:- ")
        if above == (row - 1, column):
            found[-1] += f"\n{text}"
        else:
            found.append(text)
        above = token.start if token.line[:column].isspace() or column == 0 else None
    return "\n\n".join(found).replace("``", "`")


def main() -> None:
    for name in sys.argv[1:]:
        page = Path(name).read_text()
        found = prose(remarks(page) if name.endswith(".py") else page)
        print(f"{name}: {found.words} words, {found.rate:.2f} in 100 are {RELATIVE.pattern}")
        for kind, sentences in (("begins", found.without_subject), ("long", found.long)):
            for sentence in sentences:
                print(f"  {kind}: {sentence}")


if __name__ == "__main__":
    main()
