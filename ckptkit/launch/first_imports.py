"""The libraries that a program imports before it does anything else, found without running it. Loaded by path, as the
worker is: only the standard library is imported here. The rules are those of decision 16."""

import ast
import builtins
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

# Their import depends on the environment, the path and their files, and changes nothing that a fork would lose.
LIBRARIES = frozenset(
    [
        "absl",
        "chex",
        "ckptkit",
        "click",
        "etils",
        "flax",
        "grain",
        "humanize",
        "jax",
        "jaxlib",
        "jaxtyping",
        "ml_dtypes",
        "msgpack",
        "numpy",
        "opt_einsum",
        "optax",
        "orbax",
        "rich",
        "tensorstore",
        "toolz",
        "tqdm",
        "treescope",
        "typing_extensions",
        "xxhash",
        "yaml",
        "zstandard",
    ]
)


def _named(home: str, names: str) -> frozenset[str]:
    return frozenset(f"{home}.{name}" for name in names.split())


# Calls at the top of a module that change nothing outside of it, and call nothing of the program.
_PURE_CALLS = frozenset(
    ["bool", "bytes", "dict", "float", "frozenset", "int", "len", "list", "max", "min", "range", "set", "str", "tuple"]
).union(
    _named("click", "Choice DateTime File FloatRange IntRange Path argument command group option version_option"),
    _named("collections", "Counter OrderedDict deque namedtuple"),
    _named("contextlib", "suppress"),
    _named("dataclasses", "dataclass field"),
    _named("enum", "auto"),
    _named("functools", "lru_cache partial wraps"),
    _named("logging", "getLogger"),
    _named("pathlib", "Path PurePath"),
    _named("re", "compile"),
    _named("struct", "Struct"),
    _named("threading", "Lock RLock local"),
    _named("typing", "NewType ParamSpec TypeVar TypeVarTuple cast"),
)
# Decorators that do not call what they decorate.
_DECORATORS = frozenset(("classmethod", "property", "staticmethod", "abc.abstractmethod", "chex.dataclass")).union(
    _named("click", "argument command group option pass_context version_option"),
    _named("contextlib", "asynccontextmanager contextmanager"),
    _named("dataclasses", "dataclass"),
    _named("enum", "unique"),
    _named("flax.linen", "compact jit remat"),
    _named("flax.nnx", "jit remat"),
    _named("flax.struct", "dataclass"),
    _named("functools", "cache cached_property lru_cache total_ordering wraps"),
    _named("jax", "checkpoint custom_jvp custom_vjp grad jit remat value_and_grad vmap"),
    _named("typing", "final no_type_check overload override runtime_checkable"),
)
_BASE_HOMES = frozenset(["abc", "collections", "contextlib", "enum", "typing"]) | LIBRARIES
_BUILTIN_TYPES = frozenset(name for name in dir(builtins) if isinstance(getattr(builtins, name), type))
# Functions that Python calls by itself while a module is executed.
_CALLED = frozenset(["__class_getitem__", "__getattr__", "__init_subclass__", "__prepare__", "__set_name__"])
_CALLED_BY_ENUM = frozenset(["__init__", "__new__", "_generate_next_value_"])
_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TEXT_CHARS_MAX = 60  # of a statement in a message of one line


class _End(Exception):
    """The next statement may change what a later import gives: the message is what it does."""


@dataclass(slots=True)
class _Place:
    """A file that is being walked: its statements from the current one on, and the module that this one imports."""

    path: str
    rest: list[ast.stmt]
    imported: str = ""


class FirstImports:
    """`statements`: the imports of libraries, in the order in which the program `target` makes them. `files`: the
    source files of the program that were read for that. `reason`: the line and the statement after which no import is
    taken, in words for a person; empty if the whole program was followed.

    All that a cold start runs before the last of them are imports of the standard library and statements that change
    nothing outside of their module. So the libraries are the same if they are imported alone. `path` is `sys.path` as
    the program begins with it; None: that of this process. Cost: parses the files.
    """

    def __init__(self, kind: str, target: str, path: Sequence[str] | None = None):
        self._path = list(sys.path if path is None else path)
        self.statements: list[str] = []
        self.files: list[str] = []
        self.reason = ""
        self._seen: set[str] = set()
        self._places: list[_Place] = []  # the file of the program, and those that it is importing
        try:
            if kind == "script":
                with open(target, "rb") as file:
                    self._walk(file.read(), target, None, "")
            else:
                self._walk_module(target, is_main=True)
        except _End as end:
            self.reason = self._reason(str(end))
        except (SyntaxError, ValueError, OSError, ImportError, RecursionError) as error:  # the worker raises it too
            self.reason = f"{self._at() or target} cannot be followed ({type(error).__name__}: {error})"
        if not self.statements and not self.reason:
            self.reason = f"{target} imports no library that a template may hold"

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
        if spec is None and name == "ckptkit":  # an editable install
            spec = PathFinder.find_spec(name, [os.path.dirname(_OUR_FOLDER)])
        if spec is None:
            raise _End(f"imports {name}, which is not in a folder of sys.path")
        if name not in self._seen:
            self._seen.add(name)
            if name.partition(".")[0] in LIBRARIES and spec.submodule_search_locations is not None:
                self._import(name, ())  # a package that holds the program
            elif spec.loader is None or spec.origin is None:
                if spec.submodule_search_locations is None:
                    raise _End(f"imports {name}, which has no file")
            elif type(spec.loader) is not SourceFileLoader:  # of a zip file, or compiled
                raise _End(f"imports {name}, which is not a Python file: {spec.origin}")
            else:
                package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
                with open(spec.origin, "rb") as file:
                    self._walk(file.read(), spec.origin, None if is_main else name, package)
        return spec

    def _walk(self, source: bytes, path: str, name: str | None, package: str) -> None:
        self.files.append(os.path.abspath(path))
        bound: dict[str, str] = {}  # names of this module, and what they were imported as
        body = ast.parse(source, path).body
        for index, statement in enumerate(body):
            self._places.append(_Place(path, body[index:]))
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
                raise _End(_in_words(statement) + (f" after the import of {bound['*']}" if "*" in bound else ""))
            self._places.pop()

    def _import(self, module: str, names: Iterable[str]) -> None:
        root = module.partition(".")[0]
        if self._places:
            self._places[-1].imported = root
        if root in LIBRARIES:
            if not _is_installed(root, self._path):
                raise _End(f"imports {root}, which is not installed as a package")
            words = f"from {module} import {', '.join(names)}" if names else f"import {module}"
            self.statements.append(words)
        elif root in sys.stdlib_module_names:
            if root != "__future__" and PathFinder.find_spec(root, self._path[:1]) is not None:
                raise _End(f"imports {root}, which is a file of the program")
        else:
            self._walk_job(module, names)

    def _walk_job(self, module: str, names: Iterable[str]) -> None:
        spec = self._walk_module(module)
        for name in names:
            places = spec.submodule_search_locations
            if places is None or PathFinder.find_spec(f"{module}.{name}", list(places)) is None:
                continue
            if spec.origin is not None and os.path.getsize(spec.origin):
                raise _End(f"imports {name} of {module}, which may have an attribute of that name")
            self._walk_one(f"{module}.{name}", list(places), is_main=False)

    def _reason(self, act: str) -> str:
        """Names the line of the program's own code, not one of a package that it imports."""
        depth = next((n for n, place in enumerate(self._places) if _is_of_a_package(place.path)), len(self._places))
        if 0 < depth < len(self._places):
            del self._places[depth:]
            act = f"imports {self._places[-1].imported}, which is not a library that a template may hold"
        for place in reversed(self._places):
            if (later := _library_in(place)) is not None:
                line, library = later
                subject = "it" if place is self._places[-1] else f"{_shown(place.path)} line {line}"
                comma = "," if ", which" in act else ""
                return f"{self._at()} {act}{comma} before {subject} imports {library}"
        if self.statements or not self._places:
            return f"{self._at() or 'the command'} {act}"
        last = self._places[-1]
        return f"{_shown(last.path)} imports no library before line {last.rest[0].lineno}, which {act}"

    def _at(self) -> str:
        return f"{_shown(self._places[-1].path)} line {self._places[-1].rest[0].lineno}" if self._places else ""


def _library_in(place: _Place) -> tuple[int, str] | None:
    """The line of the next import of a library in a file, and its name."""
    for statement in (inner for each in place.rest for inner in ast.walk(each)):
        if isinstance(statement, ast.Import):
            names = [each.name for each in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module or ""]
        else:
            continue
        for root in (name.partition(".")[0] for name in names):
            if root in LIBRARIES and root != place.imported:
                return statement.lineno, root
    return None


def _in_words(statement: ast.stmt) -> str:
    """The act of a statement, in one short line."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        decorators = "".join(f" with @{ast.unparse(each)}" for each in statement.decorator_list)
        return _cut(f"defines {statement.name}{decorators}")
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if not all(isinstance(each, ast.Name) for each in targets):
            return _cut(f"sets {', '.join(map(ast.unparse, targets))}")
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _cut(f"calls {ast.unparse(statement)}")
    return f"has `{_cut(ast.unparse(statement))}`"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_CHARS_MAX else f"{text[: _TEXT_CHARS_MAX - 3]}..."


def _shown(path: str) -> str:
    """A path without the folder in which the job was started."""
    return path.removeprefix(os.getcwd() + os.sep)


def _is_of_a_package(path: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep))


def _is_installed(root: str, path: Sequence[str]) -> bool:
    """Whether the name is that of the library: a program may have a module of its own with it."""
    spec = PathFinder.find_spec(root, path)
    if spec is None:
        return root == "ckptkit"  # an editable install: no entry of the path has it, so none hides this package
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    if root == "ckptkit":
        return [os.path.dirname(place) for place in places] == [_OUR_FOLDER]
    return all(map(_is_of_a_package, places))


def _asks_for_main(statement: ast.stmt) -> bool:
    test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
    return test is not None and ast.unparse(test) == "__name__ == '__main__'"


def _changes_nothing(statement: ast.stmt, bound: dict[str, str]) -> bool:
    """Whether a statement of a module changes nothing outside of it; it may read anything."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if "*" in bound:  # it may have brought any name
        return False
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return _binds_names(statement, bound)
    if isinstance(statement, ast.If):
        is_for_types = isinstance(statement.test, ast.Name) and bound.get(statement.test.id) == "typing.TYPE_CHECKING"
        return is_for_types and not statement.orelse
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        is_pure = all(_is_pure(each, bound) for each in _evaluated(statement)) and statement.name not in _CALLED
        decorated = all(_is_decorator(each, bound) for each in statement.decorator_list)
        bound[statement.name] = ""
        return is_pure and decorated
    return isinstance(statement, ast.ClassDef) and _makes_class(statement, bound)


def _binds_names(statement: ast.Assign | ast.AnnAssign | ast.AugAssign, bound: dict[str, str]) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    leaves = [leaf for each in targets for leaf in (each.elts if isinstance(each, ast.Tuple) else [each])]
    names = [leaf.id for leaf in leaves if isinstance(leaf, ast.Name)]
    read = filter(None, (statement.value, getattr(statement, "annotation", None)))
    is_pure = len(names) == len(leaves) and all(_is_pure(each, bound) for each in read)
    bound.update(dict.fromkeys(names, ""))
    return is_pure


def _makes_class(statement: ast.ClassDef, bound: dict[str, str]) -> bool:
    bases = [_origin(each.value if isinstance(each, ast.Subscript) else each, bound) for each in statement.bases]
    homes = {base.partition(".")[0] for base in bases if base not in _BUILTIN_TYPES}
    functions = {each.name for each in statement.body if isinstance(each, ast.FunctionDef)}
    is_usual = not statement.keywords and homes <= _BASE_HOMES and not ("enum" in homes and functions & _CALLED_BY_ENUM)
    decorated = all(_is_decorator(each, bound) for each in statement.decorator_list)
    inner = dict(bound)
    is_pure = all(_is_pure(each, bound) for each in statement.bases) and all(
        _changes_nothing(each, inner) for each in statement.body
    )
    bound[statement.name] = ""
    return is_usual and decorated and is_pure


def _evaluated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    """The expressions that the definition of a function evaluates, apart from its decorators."""
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
    """Whether all calls in an expression are known, and nothing but names of comprehensions is bound."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            has_key = any(keyword.arg in (None, "key") for keyword in each.keywords)  # `key` is called
            if has_key or _origin(each.func, bound) not in _PURE_CALLS:
                return False
        elif isinstance(each, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) or (
            isinstance(each, ast.Attribute | ast.Subscript) and not isinstance(each.ctx, ast.Load)
        ):
            return False
    return True


def _is_decorator(node: ast.expr, bound: dict[str, str]) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in ("setter", "deleter") and isinstance(node.value, ast.Name):
        return True
    if not isinstance(node, ast.Call):
        return _origin(node, bound) in _DECORATORS
    given = [*node.args, *(each.value for each in node.keywords)]
    if _origin(node.func, bound) == "functools.partial":  # the decorator is its first argument
        return bool(node.args) and _is_decorator(node.args[0], bound) and all(_is_pure(each, bound) for each in given)
    return _origin(node.func, bound) in _DECORATORS and all(_is_pure(each, bound) for each in given)
