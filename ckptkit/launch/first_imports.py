"""The libraries that a program imports before it does anything else, found without running it. Loaded by path, as the
worker is: only the standard library is imported here. The rules are those of decision 16."""

import ast
import builtins
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

# Their import depends on the environment, the path and their files, and changes nothing that a fork would lose.
LIBRARIES = frozenset(
    "absl chex ckptkit click etils flax grain humanize jax jaxlib jaxtyping ml_dtypes msgpack numpy opt_einsum optax "
    "orbax rich tensorstore toolz tqdm treescope typing_extensions xxhash yaml zstandard".split()
)
# Calls of these at the top of a module change nothing outside of it.
_PURE_MODULES = frozenset("abc click collections contextlib dataclasses enum functools math pathlib re struct typing".split())
_PURE_CALLS = frozenset(("logging.getLogger", "threading.Lock", "threading.RLock", "threading.local"))
_PURE_BUILTINS = frozenset("bool bytes dict float frozenset int len list max min range set str tuple".split())
_PURE_BASES = frozenset(name for name in dir(builtins) if isinstance(getattr(builtins, name), type))
_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class _End(Exception):
    """The next statement may change what a later import gives."""


class FirstImports:
    """`statements`: the imports of libraries, in the order in which the program `target` makes them. `files`: the source
    files of the program that were read for that.

    All that a cold start runs before the last of them are imports of the standard library and statements that change
    nothing outside of their module. So the libraries are the same if they are imported alone. `path` is `sys.path` as the
    program begins with it; None: that of this process. Cost: parses the files.
    """

    def __init__(self, kind: str, target: str, path: Sequence[str] | None = None):
        self._path = list(sys.path if path is None else path)
        self.statements: list[str] = []
        self.files: list[str] = []
        self._seen: set[str] = set()
        try:
            if kind == "script":
                with open(target, "rb") as file:
                    self._walk(file.read(), target, None, "")
            else:
                self._walk_module(target, is_main=True)
        except (_End, SyntaxError, ValueError, OSError, ImportError, RecursionError):
            return  # what a worker raises there it raises by itself

    def _walk_module(self, name: str, *, is_main: bool = False) -> ModuleSpec:
        """Walks the packages that hold the module, and then the module, as an import runs them."""
        path = None
        spec = None
        parts = name.split(".")
        for end in range(len(parts)):
            spec = self._walk_one(".".join(parts[: end + 1]), path, is_main=is_main and end + 1 == len(parts))
            path = list(spec.submodule_search_locations or ())
        assert spec is not None
        if is_main and spec.submodule_search_locations is not None:
            self._walk_one(f"{name}.__main__", path, is_main=True)
        return spec

    def _walk_one(self, name: str, path: list[str] | None, *, is_main: bool) -> ModuleSpec:
        spec = PathFinder.find_spec(name, self._path if path is None else path)
        if spec is None:
            raise _End
        if name not in self._seen:
            self._seen.add(name)
            if name.partition(".")[0] in LIBRARIES and spec.submodule_search_locations is not None:
                self._import(name, ())  # a package that holds the program
            elif spec.loader is None or spec.origin is None:
                if spec.submodule_search_locations is None:
                    raise _End
            elif type(spec.loader) is not SourceFileLoader:  # of a zip file, or compiled
                raise _End
            else:
                package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
                with open(spec.origin, "rb") as file:
                    self._walk(file.read(), spec.origin, None if is_main else name, package)
        return spec

    def _walk(self, source: bytes, path: str, name: str | None, package: str) -> None:
        self.files.append(os.path.abspath(path))
        bound: dict[str, str] = {}  # names of this module, and what they were imported as
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Import):
                for each in statement.names:
                    self._import(each.name, ())
                    bound[each.asname or each.name.partition(".")[0]] = (
                        each.name if each.asname else each.name.partition(".")[0]
                    )
            elif isinstance(statement, ast.ImportFrom):
                relative = "." * statement.level + (statement.module or "")
                module = importlib.util.resolve_name(relative, package)
                self._import(module, [each.name for each in statement.names])
                bound.update((each.asname or each.name, f"{module}.{each.name}") for each in statement.names)
            elif not (_changes_nothing(statement, bound) or (name is not None and _asks_for_main(statement))):
                raise _End

    def _import(self, module: str, names: Iterable[str]) -> None:
        root = module.partition(".")[0]
        if root in LIBRARIES:
            if not _is_installed(root, self._path):
                raise _End
            words = f"from {module} import {', '.join(names)}" if names else f"import {module}"
            self.statements.append(words)
        elif root in sys.stdlib_module_names:
            if root != "__future__" and PathFinder.find_spec(root, self._path[:1]) is not None:
                raise _End  # a file of the program has that name
        else:
            self._walk_job(module, names)

    def _walk_job(self, module: str, names: Iterable[str]) -> None:
        spec = self._walk_module(module)
        for name in names:
            places = spec.submodule_search_locations
            if places is None or PathFinder.find_spec(f"{module}.{name}", list(places)) is None:
                continue
            if spec.origin is not None and os.path.getsize(spec.origin):  # it may have an attribute of that name
                raise _End
            self._walk_one(f"{module}.{name}", list(places), is_main=False)


def _is_installed(root: str, path: Sequence[str]) -> bool:
    """Whether the name is that of the library: a program may have a module of its own with it."""
    spec = PathFinder.find_spec(root, path)
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    if root == "ckptkit":
        return [os.path.dirname(place) for place in places] == [_OUR_FOLDER]
    return all({"site-packages", "dist-packages"}.intersection(place.split(os.sep)) for place in places)


def _asks_for_main(statement: ast.stmt) -> bool:
    test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
    return test is not None and ast.unparse(test) == "__name__ == '__main__'"


def _changes_nothing(statement: ast.stmt, bound: dict[str, str]) -> bool:
    """Whether a statement of a module changes nothing outside of it, whatever it reads."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        rest = [statement.value, getattr(statement, "annotation", None)]
        leaves = [leaf for each in targets for leaf in (each.elts if isinstance(each, ast.Tuple) else [each])]
        names = [leaf.id for leaf in leaves if isinstance(leaf, ast.Name)]
        bound.update(dict.fromkeys(names, ""))
        return len(names) == len(leaves) and all(_is_pure(each, bound) for each in rest if each is not None)
    if isinstance(statement, ast.If):
        is_for_types = isinstance(statement.test, ast.Name) and bound.get(statement.test.id) == "typing.TYPE_CHECKING"
        return is_for_types and not statement.orelse
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        bound[statement.name] = ""
        return statement.name != "__getattr__" and all(_is_pure(each, bound) for each in _evaluated(statement)) and (
            all(_is_decorator(each, bound) for each in statement.decorator_list)
        )
    if isinstance(statement, ast.ClassDef):
        bases = all(_is_base(each, bound) for each in statement.bases)
        decorated = all(_is_decorator(each, bound) for each in statement.decorator_list)
        inner = dict(bound)
        bound[statement.name] = ""
        return bases and decorated and not statement.keywords and all(
            _changes_nothing(each, inner) for each in statement.body
        )
    return False


def _evaluated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    """What is evaluated at the definition of a function, apart from its decorators."""
    arguments = function.args
    yield from arguments.defaults
    yield from filter(None, arguments.kw_defaults)
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    yield from (each.annotation for each in every if each is not None and each.annotation is not None)
    if function.returns is not None:
        yield function.returns


def _origin(node: ast.expr, bound: dict[str, str]) -> str:
    """The dotted name of what an expression names, as it was imported; of a builtin its name; else empty."""
    if isinstance(node, ast.Attribute):
        home = _origin(node.value, bound)
        return f"{home}.{node.attr}" if home else ""
    if isinstance(node, ast.Name):
        return bound.get(node.id, node.id if hasattr(builtins, node.id) else "")
    return ""


def _is_pure(node: ast.expr, bound: dict[str, str]) -> bool:
    return all(_is_pure_call(each.func, bound) for each in ast.walk(node) if isinstance(each, ast.Call)) and not any(
        isinstance(each, ast.NamedExpr | ast.Await) for each in ast.walk(node)
    )


def _is_pure_call(function: ast.expr, bound: dict[str, str]) -> bool:
    origin = _origin(function, bound)
    return origin in _PURE_CALLS or origin in _PURE_BUILTINS or origin.partition(".")[0] in _PURE_MODULES


def _is_decorator(node: ast.expr, bound: dict[str, str]) -> bool:
    function = node.func if isinstance(node, ast.Call) else node
    given = [*node.args, *(each.value for each in node.keywords)] if isinstance(node, ast.Call) else []
    origin = _origin(function, bound)
    builtin = origin in ("property", "staticmethod", "classmethod")
    known = builtin or origin.partition(".")[0] in _PURE_MODULES | LIBRARIES
    return (known or _is_setter(node)) and all(_is_pure(each, bound) for each in given)


def _is_setter(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("setter", "deleter") and isinstance(node.value, ast.Name)


def _is_base(node: ast.expr, bound: dict[str, str]) -> bool:
    node = node.value if isinstance(node, ast.Subscript) else node
    origin = _origin(node, bound)
    return origin in _PURE_BASES or origin.partition(".")[0] in _PURE_MODULES | LIBRARIES
