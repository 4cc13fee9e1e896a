"""How a page is written: its sentences, and those that are beside the rules of CONTRIBUTING.md.

``python -m tests.prose PAGE ...`` prints them, also for the comments of files of C, for the
docstrings and comments of files of Python, and for those of a folder's files.
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
C = {".c", ".h", ".cu"}
PYTHON = {".py", ".pyi"}
LITERAL_OR_COMMENT = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*(.*?)\*/|//([^\n]*)', re.S
)
LABEL = re.compile(r"^( *\S[^.?!\n]{0,40}?[^\s.?!:)\]]) {2,}(?=\S)", re.M)  # "Threads  any."
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


def comments(source: str) -> str:
    """Comments of C as a page: a paragraph each, and their labels as headings."""
    found = [c or line for c, line in LITERAL_OR_COMMENT.findall(source) if c or line]
    text = "\n\n".join(re.sub(r"^\s*\*( |$)", "", c, flags=re.M) for c in found)
    return LABEL.sub(r"\1\n\n", text)


def page_of(path: Path) -> str:
    """A page, or what a file of code says, or a folder's files."""
    if path.is_dir():
        files = (file for file in sorted(path.iterdir()) if file.suffix in (*C, *PYTHON))
        return "\n\n".join(map(page_of, files))
    text = path.read_text()
    if path.suffix in C:
        return comments(text)
    return remarks(text) if path.suffix in PYTHON else text


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
        found = prose(page_of(Path(name)))
        print(f"{name}: {found.words} words, {found.rate:.2f} in 100 are {RELATIVE.pattern}")
        for kind, sentences in (("begins", found.without_subject), ("long", found.long)):
            for sentence in sentences:
                print(f"  {kind}: {sentence}")


if __name__ == "__main__":
    main()
