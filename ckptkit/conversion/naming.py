"""By which names rules, casts and `--only` may call a leaf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from ckptkit.formats.tensors import Tensor
from ckptkit.model.leaf_patterns import matches, short_names


@final
class LeafNames:
    """The names of tensors: as stored, without NNX's last `value`, and either of them after `item:`, as `inspect`
    prints it."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._forms: dict[str, tuple[str, ...]] = {}
        short = short_names(list(tensors))
        of_item = short_names([tensor.name for tensor in tensors.values()])
        for (name, tensor), shorter, own in zip(tensors.items(), short, of_item, strict=True):
            with_item = (f"{tensor.item}:{tensor.name}", f"{tensor.item}:{own}") if tensor.item else ()
            self._forms[name] = tuple(dict.fromkeys((name, shorter, *with_item)))
        self._stored = {form: name for name, forms in self._forms.items() for form in forms[::-1]}
        self._stored.update({name: name for name in self._forms})

    def matching(self, pattern: str) -> dict[str, str]:
        """The leaves whose name matches a pattern: by stored name, the first form that matched."""
        found = {}
        for name, forms in self._forms.items():
            form = next((form for form in forms if matches(pattern, form)), None)
            if form is not None:
                found[name] = form
        return found

    def below(self, pattern: str) -> set[str]:
        """The stored names of the leaf or sub-tree of that name, and of the leaves that match it as a pattern."""
        return {
            name
            for name, forms in self._forms.items()
            if any(form == pattern or form.startswith(f"{pattern}.") or matches(pattern, form) for form in forms)
        }

    def stored(self, form: str) -> str | None:
        """The stored name of the leaf that is called so; None where there is none."""
        return self._stored.get(form)
