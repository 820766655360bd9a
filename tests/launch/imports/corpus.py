# ruff: noqa: E501  a program is easier to read on one line
"""Small programs that do at import what real ones do. Each prints what it sees: cold and warm have to print the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Acts of a module at its import. SEEN is the same in every start, DRAWN another value in every process.
ACTS: Mapping[str, str] = {
    "reads_variable": "import os\nSEEN = os.environ.get('FLAVOUR')",
    "reads_rank": "import os\nSEEN = os.environ['CKPTKIT_PROCESS']",
    "sets_jax_variable": "import os\nos.environ['JAX_ENABLE_X64'] = '1'",
    "sets_default": "import os\nos.environ.setdefault('JAX_DEFAULT_MATMUL_PRECISION', 'highest')",
    "removes_variable": "import os\nos.environ.pop('FLAVOUR', None)\nSEEN = 'FLAVOUR' in os.environ",
    "puts_variable": "import os\nos.putenv('OPENBLAS_NUM_THREADS', '1')",
    "adds_path": "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), 'more'))\nimport other\nSEEN = other.V",
    "changes_directory": "import os\nos.chdir('/')\nSEEN = os.getcwd()",
    "reads_file": "import json, os\nSEEN = json.load(open(os.path.join(os.path.dirname(__file__), 'data.json')))",
    "lists_directory": "import os\nSEEN = sorted(n for n in os.listdir(os.path.dirname(__file__)) if n.endswith('.json'))",
    "draws_random": "import random\nDRAWN = random.random()",
    "seeds_random": "import random\nrandom.seed(7)\nSEEN = random.random()",
    "draws_numpy": "import numpy\nDRAWN = numpy.random.default_rng().integers(1 << 60)",
    "draws_numpy_global": "import numpy\nDRAWN = numpy.random.rand()",
    "seeds_numpy": "import numpy\nnumpy.random.seed(7)\nSEEN = numpy.random.rand()",
    "draws_uuid": "import uuid\nDRAWN = uuid.uuid4().hex",
    "draws_secret": "import secrets\nDRAWN = secrets.token_hex(8)",
    "draws_bytes": "import os\nDRAWN = os.urandom(8).hex()",
    "draws_by_name": "from os import urandom\nDRAWN = urandom(8).hex()",
    "reads_entropy_file": "DRAWN = open('/dev/urandom', 'rb').read(8).hex()",
    "reads_clock": "import datetime\nDRAWN = datetime.datetime.now().isoformat()",
    "reads_pid": "import os\nDRAWN = os.getpid()",
    "reads_host": "import socket\nSEEN = socket.gethostname()",
    "makes_temporary": "import tempfile\nDRAWN = tempfile.mkdtemp()",
    "opens_socket": "import socket\nKEPT = socket.socket()\nKEPT.bind(('127.0.0.1', 0))\nDRAWN = KEPT.getsockname()[1]",
    "registers_exit": "import atexit\natexit.register(lambda: print('SEEN ended', flush=True))",
    "starts_thread": "import threading, time\nT = threading.Thread(target=time.sleep, args=(9,), daemon=True)\nT.start()\nSEEN = T.is_alive()",
    "configures_logging": "import logging\nlogging.basicConfig(level=logging.DEBUG)\nSEEN = logging.getLogger().level",
    "filters_warnings": "import warnings\nwarnings.simplefilter('error')\nSEEN = len(warnings.filters) > 0",
    "handles_signal": "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\nSEEN = str(signal.getsignal(signal.SIGUSR1))",
    "patches_library": "import json\njson.dumps.__kwdefaults__['sort_keys'] = True\nSEEN = json.dumps({'b': 1, 'a': 2})",
    "sets_limit": "import sys\nsys.setrecursionlimit(4321)\nSEEN = sys.getrecursionlimit()",
    "parses_words": "import sys\nSEEN = sys.argv[2:]",
    "reads_git": "import subprocess\nSEEN = subprocess.run(['git', '--version'], capture_output=True, text=True).stdout",
    "imports_by_name": "import importlib\nSEEN = importlib.import_module('colorsys').__name__",
    "sets_jax_option": "import jax\njax.config.update('jax_enable_x64', True)",
    "sets_print_options": "import numpy\nnumpy.set_printoptions(precision=3)\nSEEN = str(numpy.float64(1) / 3 * numpy.ones(1))",
    "parses_absl_flags": "from absl import flags\nflags.DEFINE_integer('steps', 3, 'x')\nSEEN = flags.FLAGS(['p', '--steps=5']) and flags.FLAGS.steps",
}
_FOOTER = """
def report():
    import json, os, sys
    jax, numpy = sys.modules.get("jax"), sys.modules.get("numpy")
    mine = [m for m in map(sys.modules.get, ("mine", "pkg.mine")) if m is not None] + [sys.modules["__main__"]]
    for module in mine:
        if hasattr(module, "SEEN"):
            print("SEEN", json.dumps(module.SEEN))
        if hasattr(module, "DRAWN"):
            print("DRAWN", module.DRAWN)
    own = ("CKPTKIT_COORDINATOR", "CKPTKIT_AGENT", "CUDA_VISIBLE_DEVICES")
    print("ENV", json.dumps({k: v for k, v in sorted(os.environ.items()) if k not in own}))
    print("PATH", json.dumps(sys.path), os.getcwd(), str(sys.flags), sys.argv[1:])
    roots = {n.partition(".")[0] for n in sys.modules} - sys.stdlib_module_names
    print("MODULES", json.dumps(sorted(n for n in sys.modules if n.partition(".")[0] in roots and not n.startswith("_"))))
    if numpy is not None:
        print("NUMPY", numpy.get_printoptions()["precision"], numpy.geterr())
    if jax is not None:
        print("JAX", jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision, jax.numpy.ones(2).dtype)
        print("VALUE", jax.numpy.exp(jax.numpy.arange(3.0)).tolist())
    print(flush=True)
    sys.exit(3 * (sys.argv[1] == "0"))
report()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The files of a program, and the words after `python` that run it."""

    name: str
    files: Mapping[str, str]
    words: tuple[str, ...] = ("s.py",)


def programs() -> Iterator[Program]:
    """All programs: each act before and after the import of a library, and the shapes that programs have."""
    for name, act in ACTS.items():
        library = "jax" if "jax" in name or name in ("sets_default", "adds_path", "parses_absl_flags") else "numpy"
        mine = {"mine.py": f"{act}\nimport {library}\n", "data.json": "[1]", "more/other.py": "V = 2\n"}
        yield Program(name=f"{name}-before", files={**mine, "s.py": f"import mine\nimport {library}\n{_FOOTER}"})
        yield Program(name=f"{name}-after", files={**mine, "s.py": f"import {library}\nimport mine\n{_FOOTER}"})
    yield from _shapes()


def _shapes() -> Iterator[Program]:
    sets = "import os\nos.environ['JAX_ENABLE_X64'] = '1'\n"
    imports = f"import jax\n{_FOOTER}"
    yield Program(name="script-sets-first", files={"s.py": sets + imports})
    yield Program(name="script-sets-last", files={"s.py": f"import jax\n{sets}{_FOOTER}"})
    yield Program(name="star", files={"mine.py": f"{sets}SEEN = 1\n", "s.py": f"from mine import *\n{imports}"})
    package = {"pkg/__init__.py": "", "pkg/mine.py": sets, "s.py": f"from pkg import mine\n{imports}"}
    yield Program(name="package", files=package)
    package = {"pkg/mine.py": sets, "s.py": f"import pkg.mine\n{imports}"}
    yield Program(name="namespace", files=package)
    package = {
        "pkg/__init__.py": sets,
        "pkg/__main__.py": f"from . import mine\n{imports}",
        "pkg/mine.py": "import jax\n",
    }
    yield Program(name="main-of-a-package", files=package, words=("-m", "pkg"))
    package = {"pkg/__init__.py": "from pkg.a import mine\n", "pkg/a.py": "mine = 1\n", "pkg/mine.py": sets}
    yield Program(name="attribute-not-module", files={**package, "s.py": f"from pkg import mine\n{imports}"})
    yield Program(name="shadowed-library", files={"click.py": sets, "s.py": f"import click\n{imports}"})
    yield Program(name="shadowed-standard", files={"colorsys.py": sets, "s.py": f"import colorsys\n{imports}"})
    yield Program(name="decorator", files={"mine.py": f"{sets}def deco(f):\n    return f\n@deco\ndef f():\n    pass\n",
                                           "s.py": f"import mine\n{imports}"})  # fmt: skip
    hides = "import os\ndef put():\n    os.environ['JAX_ENABLE_X64'] = '1'\n"
    yield Program(
        name="call-in-default",
        files={"mine.py": f"{hides}def f(x=put()):\n    pass\n", "s.py": f"import mine\n{imports}"},
    )
    yield Program(
        name="call-in-class", files={"mine.py": f"{hides}class A:\n    put()\n", "s.py": f"import mine\n{imports}"}
    )
    yield Program(
        name="call-in-annotation",
        files={"mine.py": f"{hides}def f(x: put()):\n    pass\n", "s.py": f"import mine\n{imports}"},
    )
    yield Program(
        name="call-in-f-string", files={"mine.py": hides + "X = f'{put()}'\n", "s.py": f"import mine\n{imports}"}
    )
    yield Program(name="subclass-hook", files={
        "mine.py": f"{hides}class A:\n    def __init_subclass__(cls):\n        put()\nclass B(A):\n    pass\n",
        "s.py": f"import mine\n{imports}"})  # fmt: skip
    yield Program(
        name="renamed-builtin", files={"mine.py": f"{hides}len = put\nX = len()\n", "s.py": f"import mine\n{imports}"}
    )
    yield Program(name="lazy-attribute", files={
        "lazy.py": f"{hides}def __getattr__(name):\n    if name == 'x':\n        put()\n        return 1\n    raise AttributeError(name)\n",
        "mine.py": "import lazy\nX = lazy.x\n", "s.py": f"import mine\n{imports}"})  # fmt: skip
    yield Program(name="lazy-import-from", files={
        "lazy.py": "import tools_of\ndef f():\n    pass\n", "tools_of.py": f"{hides}put()\n",
        "s.py": f"from lazy import f\n{imports}"})  # fmt: skip
    yield Program(
        name="item-of-a-mapping", files={"s.py": f"import os\nE = os.environ\nE['JAX_ENABLE_X64'] = '1'\n{imports}"}
    )
    yield Program(
        name="loop-target",
        files={"s.py": f"import os\nfor os.environ['JAX_ENABLE_X64'] in ['1']:\n    pass\n{imports}"},
    )
    yield Program(
        name="tuple-target", files={"s.py": f"import os\na, os.environ['JAX_ENABLE_X64'] = 0, '1'\n{imports}"}
    )
    yield Program(
        name="nested-target",
        files={"s.py": f"import os\n(a, (b, os.environ['JAX_ENABLE_X64'])) = 0, (1, '1')\n{imports}"},
    )
    yield Program(name="comprehension-target", files={
        "s.py": f"import os\nX = [0 for os.environ['JAX_ENABLE_X64'] in ['1']]\n{imports}"})  # fmt: skip
    yield Program(name="map-with-effects", files={"mine.py": f"{hides}X = list(map(lambda x: os.environ.update(JAX_ENABLE_X64='1'), [1]))\n",
                                                 "s.py": f"import mine\n{imports}"})  # fmt: skip
    yield Program(
        name="sorted-key",
        files={"mine.py": f"{hides}X = max([1, 2], key=lambda x: put() or x)\n", "s.py": f"import mine\n{imports}"},
    )
    yield Program(name="key-by-name", files={"mine.py": "import os\ndef put(x):\n    os.environ['JAX_ENABLE_X64'] = '1'\n    return x\nX = max([1, 2], key=put)\n",
                                            "s.py": f"import mine\n{imports}"})  # fmt: skip
    yield Program(name="partial-of-a-function", files={
        "mine.py": "import os\nfrom functools import reduce\ndef put(a, b):\n    os.environ['JAX_ENABLE_X64'] = '1'\nX = reduce(put, [1, 2])\n",
        "s.py": f"import mine\n{imports}"})  # fmt: skip
