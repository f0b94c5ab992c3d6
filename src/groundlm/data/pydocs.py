"""The built-in corpus `pydocs`: English documentation that ships inside CPython."""

import ast
import platform
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from datatrove.pipeline.readers.base import BaseReader

from groundlm.data.readers import TextPolicy
from groundlm.errors import UserError

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class PydocsReader(TextPolicy, BaseReader):
    """About 2.5 MB: the topics of Python's `help()` and the docstrings of its standard library.

    Each topic is a document and so is each module: its docstring, then those of its classes and
    functions, each under its dotted name. Modules are read with `ast`, never imported; their
    order, and so the corpus, depends on the Python version alone.
    """

    name = "pydocs"

    def __init__(self) -> None:
        super().__init__()
        self.start_counting()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        root = Path(sysconfig.get_paths()["stdlib"])
        for name, text in documents(root)[rank::world_size]:
            if document := self.get_document(text, f"pydocs/{name}"):
                yield document


def version() -> str:
    """What the corpus depends on, for fingerprints: implementation and version of Python."""
    return f"{platform.python_implementation()} {platform.python_version()}"


# The tokenizer's training and the tokenising both read the corpus, and parsing takes seconds.
@lru_cache(maxsize=1)
def documents(stdlib: Path) -> list[tuple[str, str]]:
    """(name, text) of every document, topics first, each kind in sorted order.

    Raises UserError if this Python comes without its documentation or sources.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError("input 'pydocs': this Python lacks pydoc_data.topics") from error
    found = [(f"topic/{name}", text) for name, text in sorted(topics.items())]
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            if text := module_text(path, module):
                found.append((f"module/{module}", text))
    return found


def module_text(path: Path, module: str) -> str:
    """The docstrings of a source file, or '' if it has none or is not Python of this version."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that a later Python refuses
            tree = ast.parse(file.read())
    except (SyntaxError, UnicodeDecodeError):
        return ""
    entries = [f"{name}\n\n{text}\n" for name, text in docstrings(tree, module) if text.strip()]
    return "\n".join(entries)


def docstrings(node: Documented, name: str) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of the node and of what is defined directly in it, depth first."""
    if text := ast.get_docstring(node):
        yield name, text
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from docstrings(child, f"{name}.{child.name}")
